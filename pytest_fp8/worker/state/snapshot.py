"""What a pass over the model changes, put back afterwards: ``with unchanged(engine): engine.step(batch)``.

A training step moves more than weights: running statistics, a counter that says when layers are unfrozen, a hidden
state, a learning rate, random generators. Both arms must be compared after equally many steps, although one of them may
have run more passes, as delayed scaling needs.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from pytest_fp8.source_text import is_of_a_library
from pytest_fp8.worker.tensors import held, is_plain
from pytest_fp8.worker.training.restored import replaced_method
from pytest_fp8.worker.training.step import closure_of, innermost, optimizers_of, settings_now

_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""What torch keeps in each module: parameters, buffers, hooks."""
_OF_OPTIMIZERS = ("state", "param_groups", "defaults")
"""What torch keeps in each optimizer; :func:`muted` puts it back."""
LARGEST = 2**24
"""Values of an attribute that is copied: a table of data that a model holds is not copied for each pass."""
MOST_KEPT = 4 * 2**30
"""Bytes of weights that are copied for a pass."""


@contextmanager
def unchanged(engine: Any, besides: Container[torch.nn.Module] = ()) -> Iterator[None]:
    """Steps and passes inside change nothing that training keeps, and leave no gradients.

    The optimizer's steps are left out (:func:`muted`); all else is put back. Buffers of the modules ``besides`` stay as
    the pass leaves them: scales that it is run for. So does scaling state that a library keeps outside of buffers.

    The weights of a user's model are copied, since a pass may move them past the optimizer that the step is given: with
    a second one, with one that steps in the backward pass, or by averages that a forward pass takes. Not sharded ones,
    and not those of a model that is too large to be copied, or has no room left beside it.
    """
    model = engine.model
    # A step that evaluates leaves FSDP2's root unsharded: parameters whose memory the next backward pass frees.
    engine.settle()
    buffers = [
        name
        for name, _ in model.named_buffers(remove_duplicate=False)
        if model.get_submodule(name.rpartition(".")[0]) not in besides
    ]
    own = [p for p in model.parameters() if engine.setup.own is not None and is_plain(p) and not held(p).is_part]
    size = sum(p.numel() * p.element_size() for p in own)
    room = torch.cuda.mem_get_info()[0] if any(p.is_cuda for p in own) else 2 * MOST_KEPT
    # A forward pass may put another tensor in a weight's place: param.data = ...
    before = [(p, p.data) for p in own]
    with generators_kept(), muted(engine.optimizer), ExitStack() as stack:
        stack.callback(Snapshot(model, buffers, innermost(engine.optimizer)).restore)
        stack.enter_context(values_kept(own if size <= min(MOST_KEPT, room / 2) else ()))
        try:
            yield
        finally:
            engine.settle()
            for parameter, data in before:
                if parameter.data.data_ptr() != data.data_ptr():
                    parameter.data = data


class Snapshot:
    """What a model keeps besides its weights, as it is now: modes of modules, what is trained, buffers, and attributes;
    and attributes that a hand-written step set on its optimizer.

    Attributes count where they are numbers, flags, text, tensors, random generators, or lists, dicts, sets and queues
    of the user's own modules, such as a hidden state that is kept from step to step. A converted layer is a library's,
    and keeps its own.
    """

    def __init__(self, model: torch.nn.Module, buffers: Iterable[str], optimizer: object = None) -> None:
        """``buffers``: names of those that count."""
        self._values: list[tuple[dict[str, Any], str, Any, Any]] = []
        """Where it is held, its name, and what it is; of a tensor also a copy of its values."""
        self._generators: list[Callable[[], object]] = []
        """Each puts a random generator back."""
        self._containers: dict[int, tuple[Any, Any]] = {}
        """id -> a list, dict, set or queue, and a copy of what it holds; those inside it as well."""
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        for module in model.modules():
            self._values.append((vars(module), "training", module.training, None))
            if not is_of_a_library(type(module).__module__):
                for name, value in vars(module).items():
                    if name not in _OF_MODULES:
                        self._note_attribute(vars(module), name, value)
        self._of_optimizer = vars(optimizer) if optimizer is not None else {}
        self._there = set(self._of_optimizer)
        for name, value in self._of_optimizer.items():
            if not name.startswith("_") and name not in _OF_OPTIMIZERS:
                self._note_attribute(self._of_optimizer, name, value)
        for name in buffers:
            holder, _, key = name.rpartition(".")
            # Private: it is put back as the other entries are. A public dict of a module's buffers would replace it.
            entries = model.get_submodule(holder)._buffers
            self._values.append((entries, key, entries[key], entries[key].detach().clone()))  # type: ignore[union-attr]

    def _note_attribute(self, entries: dict[str, Any], name: str, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            self._note_container(value)
        elif type(value) is torch.Tensor and value.numel() <= LARGEST and not value.is_meta:
            self._values.append((entries, name, value, value.detach().clone()))
            return
        elif (put_back := _generator_as_now(value)) is not None:
            self._generators.append(put_back)
        elif value is not None and type(value) not in (int, float, bool, str):
            return
        self._values.append((entries, name, value, None))

    def _note_container(self, container: Any) -> None:
        if id(container) in self._containers:
            return
        content = dict(container) if isinstance(container, dict) else list(container)
        self._containers[id(container)] = container, content
        for part in content.values() if isinstance(content, dict) else content:
            if isinstance(part, _CONTAINERS):
                self._note_container(part)

    @torch.no_grad()
    def restore(self) -> None:
        for put_back in self._generators:
            put_back()
        for container, content in self._containers.values():
            if not _holds(container, content):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(content)
        for entries, name, value, content in self._values:
            now = entries.get(name)
            # What a training counts or keeps, and came in place of nothing, goes; another object may be a handle.
            if now is not value and (value is not None or isinstance(now, (torch.Tensor, int, float, *_CONTAINERS))):
                entries[name] = value
            # A graph that is still needed refuses a tensor that was written to.
            if content is not None and not (type(value) is torch.Tensor and torch.equal(value, content)):
                value.copy_(content)
        for name in {name for name in self._of_optimizer if name[0] != "_"} - self._there:
            del self._of_optimizer[name]
        for parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)

    def restart_counters(self) -> None:
        """Numbers and random generators alone are again what they were. A model may count its calls, or draw, by which
        it chooses what it computes; no checkpoint of its weights has that."""
        for put_back in self._generators:
            put_back()
        for entries, name, value, _ in self._values:
            if type(value) in (int, float):
                entries[name] = value


def _holds(container: Any, content: Any) -> bool:
    """Whether it holds the same objects still, in their order. Not by ``==``, which tensors do not answer."""
    if isinstance(container, dict):
        return list(map(id, container)) == list(map(id, content)) and all(container[k] is v for k, v in content.items())
    return list(map(id, container)) == list(map(id, content))


def _generator_as_now(value: Any) -> Callable[[], object] | None:
    """What puts a random generator back to where it is now; ``None`` for anything else."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    return None


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The tensors may be changed in place."""
    copies = [(each, each.copied()) for each in map(held, tensors)]
    try:
        yield
    finally:
        for each, values in copies:
            each.fill(values)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Random generators are afterwards where they were: torch's, numpy's and Python's."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def muted(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """``optimizer.step()`` changes no weight inside, and the schedule and the settings of groups are restored.

    An optimizer that is given a closure runs forward and backward pass inside its step, and a loop may have looked
    ``optimizer.step`` up before: these do step, and weights and state are restored afterwards.
    """
    stepped: set[int] = set()
    with ExitStack() as stack:
        stack.callback(innermost(optimizer).zero_grad, set_to_none=True)
        stack.callback(settings_now(optimizer))
        for one in optimizers_of(optimizer):

            def before(real: torch.optim.Optimizer, *_: Any) -> None:
                if id(real) not in stepped:
                    stepped.add(id(real))
                    stack.callback(_put_back_state, real, copy.deepcopy(list(real.state.values())), list(real.state))
                    stack.enter_context(values_kept(p for group in real.param_groups for p in group["params"]))

            stack.callback(one.register_step_pre_hook(before).remove)
            # Private: torch's schedules look for it and warn without it.
            one._opt_called = True  # type: ignore[attr-defined]
            stack.enter_context(replaced_method(one, "step", _unless_closure))
        yield


def _unless_closure(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if closure_of(args, kwargs) is None else real(*args, **kwargs)


def _put_back_state(optimizer: torch.optim.Optimizer, entries: list[Any], parameters: list[torch.Tensor]) -> None:
    optimizer.state.clear()
    optimizer.state.update(zip(parameters, entries, strict=True))
