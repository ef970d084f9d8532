"""What a model keeps besides its weights: buffers, numbers and flags of its modules, modes, what is trained.

A training step may move it: a counter that says when layers are unfrozen, running statistics. Both arms must then be
compared after equally many steps, although one of them may have run more passes, as delayed scaling needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pytest_fp8.source_text import is_of_a_library
from pytest_fp8.worker.state.training_state import buffers_kept
from pytest_fp8.worker.tensors import is_part, is_plain, plain_name
from pytest_fp8.worker.training.restored import values_kept

_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What torch keeps in each module: parameters, buffers, hooks."""
LARGEST = 2**24
"""Values of a tensor that is noted: a table of data that a model holds is not copied for each pass."""
MOST_KEPT = 4 * 2**30
"""Bytes of weights that are copied for a pass."""
MODE, TRAINED = "mode", "trained"
WORDS = {
    (MODE, True): "put into train mode",
    (MODE, False): "put into eval mode",
    (TRAINED, True): "made trainable",
    (TRAINED, False): "frozen",
}


class OwnState:
    """As it is now, without the buffers that a restart takes from a fresh model.

    Attributes count where they are numbers, flags, text, tensors, or lists, dicts, sets and queues of the user's own
    modules, such as a hidden state that is kept from step to step. A converted layer is a library's, and keeps its own.
    """

    def __init__(self, model: torch.nn.Module, buffers: Iterable[str] = ()) -> None:
        """``buffers``: names of those that count, too."""
        modules = list(model.modules())
        held = [
            (vars(module), key, value)
            for module in modules
            if not is_of_a_library(type(module).__module__)
            for key, value in vars(module).items()
            if key not in _OF_MODULES
        ]
        for name in buffers:
            holder, _, key = name.rpartition(".")
            entries = model.get_submodule(holder)._buffers
            held.append((entries, key, entries[key]))
        self._attributes = [each for each in held if type(each[2]) in (int, float, bool, str)]
        self._tensors = [
            (entries, key, value, value.detach().clone() if value is not None else None)
            for entries, key, value in held
            if value is None or (type(value) is torch.Tensor and value.numel() <= LARGEST and not value.is_meta)
        ]
        self._attributes += [(vars(module), "training", module.training) for module in modules]
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        self._containers: dict[int, tuple[Any, Any]] = {}
        """id -> a list, dict, set or queue, and a copy of what it holds; those inside it as well."""
        for entries, key, value in held:
            if isinstance(value, _CONTAINERS):
                self._attributes.append((entries, key, value))
                self._note(value)

    def _note(self, container: Any) -> None:
        if id(container) in self._containers:
            return
        content = dict(container) if isinstance(container, dict) else list(container)
        self._containers[id(container)] = container, content
        for part in content.values() if isinstance(content, dict) else content:
            if isinstance(part, _CONTAINERS):
                self._note(part)

    def restore(self) -> None:
        for container, content in self._containers.values():
            if not _holds(container, content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for entries, key, value in self._attributes:
            now = entries.get(key)
            if now is not value and (isinstance(value, _CONTAINERS) or now != value):
                entries[key] = value
        for entries, key, tensor, content in self._tensors:
            now = entries.get(key)
            if now is not tensor and type(now) in (torch.Tensor, type(None)):
                entries[key] = tensor
            if tensor is not None and content is not None and not torch.equal(tensor, content):
                with torch.no_grad():
                    tensor.copy_(content)
        for parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


def _holds(container: Any, content: Any) -> bool:
    """Whether it holds the same objects still, in their order. Not by ``==``, which tensors do not answer."""
    if isinstance(container, dict):
        return list(map(id, container)) == list(map(id, content)) and all(container[k] is v for k, v in content.items())
    return list(map(id, container)) == list(map(id, content))


def flags_of(model: torch.nn.Module) -> dict[tuple[str, str], bool]:
    """(which flag, plain name) -> its value: modes of modules, and which parameters are trained."""
    modes = {(MODE, plain_name(name)): module.training for name, module in model.named_modules()}
    trained = {(TRAINED, plain_name(name)): parameter.requires_grad for name, parameter in model.named_parameters()}
    return modes | trained


def changed_flags(before: Mapping[tuple[str, str], bool], model: torch.nn.Module) -> dict[str, list[str]]:
    """What was done to them since, in words -> names."""
    changed: dict[str, list[str]] = {}
    for (flag, name), value in flags_of(model).items():
        if before.get((flag, name), value) != value:
            changed.setdefault(WORDS[flag, value], []).append(name or "the model")
    return changed


@contextmanager
def own_state_kept(model: torch.nn.Module, is_fp8_layer: Callable[[torch.nn.Module], bool]) -> Iterator[None]:
    """Passes inside leave it as it was, buffers included. FP8 layers keep theirs: scales may be buffers."""
    state = OwnState(model)
    fp8 = {part for module in model.modules() if is_fp8_layer(module) for part in module.modules()}
    try:
        with buffers_kept(model, fp8):
            yield
    finally:
        state.restore()


def weights_kept(model: torch.nn.Module, own: bool) -> AbstractContextManager[None]:
    """The weights of a user's model, which a pass may move past the optimizer that the step is given: with a second
    one, with one that steps in the backward pass, or by averages that a forward pass takes. Sharded weights may move,
    and those of a model that is too large to be copied, or has no room left beside it."""
    plain = [p for p in model.parameters() if own and is_plain(p) and not is_part(p)]
    size = sum(p.numel() * p.element_size() for p in plain)
    room = torch.cuda.mem_get_info()[0] if any(p.is_cuda for p in plain) else 2 * MOST_KEPT
    return values_kept(plain) if size <= min(MOST_KEPT, room / 2) else nullcontext()
