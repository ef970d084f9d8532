"""What a training run keeps beside weights and the optimizer's state of each parameter: listed, stored and loaded.

The schedule, the entries of parameter groups, what the optimizer keeps as attributes (averages of weights, counters),
buffers that are not persistent, and the states of random generators.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from pytest_fp8.backends.base import Backend
from pytest_fp8.questions.checkpoints.evidence import Kept
from pytest_fp8.worker.state import optimizer_extras
from pytest_fp8.worker.state.checkpoint_stores import digests
from pytest_fp8.worker.state.fused_params import plain_name
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.restored import values_kept
from pytest_fp8.worker.training.schedule import load_schedule_state, schedule_of, schedule_state
from pytest_fp8.worker.training.zero import ZeroOptimizer
from pytest_fp8.zoo.batch import with_tensors

SWITCHES = ("foreach", "fused", "capturable", "differentiable")
"""Entries of a group that choose an implementation and keep nothing."""
_LISTED_ELSEWHERE = ("state", "param_groups", "defaults", "scheduler", "optimizer")
"""Attributes of an optimizer that are listed by other means."""
_DEEPEST = 8
"""Levels of containers that are looked into."""


def kept(model: torch.nn.Module, optimizer: Any, backend: Backend) -> Kept:
    """What is kept now."""
    inner = innermost(optimizer)
    schedule = schedule_of(optimizer)
    walk = _Walk(model)
    groups = [
        (f"group {index}: {name}", value)
        for index, group in enumerate(inner.param_groups)
        for name, value in group.items()
        if name != "params" and name not in SWITCHES
    ]
    return Kept(
        schedule=dict(walk.entries("", schedule_state(schedule))),
        groups={key: value for name, entry in groups for key, value in walk.entries(name, entry)},
        attributes={
            key: value for name, entry in _attributes(optimizer).items() for key, value in walk.entries(name, entry)
        },
        buffers={name: _tensor(name, value) for name, value in _not_persistent(model, backend)},
        generators=generators(),
    )


class _Walk:
    """Lists the numbers and tensors in any value. What belongs to the model is listed with its weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._models = {id(module) for module in model.modules()}
        self._models |= {id(value) for value in (*model.parameters(), *model.buffers())}

    def entries(self, name: str, value: Any, only_tensors: bool = False, depth: int = 0) -> Iterator[tuple[str, Any]]:
        """(name, number or text of a digest). Names with a leading underscore are a library's own bookkeeping: of
        these only tensors count."""
        if id(value) in self._models or depth > _DEEPEST:
            return
        if isinstance(value, torch.Tensor):
            yield name, _tensor(name, value)
        elif isinstance(value, (bool, int, float)):
            if not only_tensors:
                yield name, value
        elif isinstance(value, Mapping):
            for index, (key, part) in enumerate(value.items()):
                label = str(key if isinstance(key, (str, int)) else index)
                if label.endswith("_extra_state"):
                    continue  # scaling state of Transformer Engine, which the other precision does not have
                private = label.startswith("_") and label != "_schedulers"
                yield from self.entries(_joined(name, label), part, only_tensors or private, depth + 1)
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                yield from self.entries(f"{name}[{index}]", part, only_tensors, depth + 1)
        elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
            yield from self.entries(name, value.state_dict(), only_tensors, depth + 1)


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _tensor(name: str, value: torch.Tensor) -> Any:
    """A tensor of one element as its number, another as the text of its digest."""
    value = value.detach()
    if value.numel() == 1 and optimizer_extras.is_tensor(value) and not value.is_complex():
        return value.item()
    parts = digests(dict(optimizer_extras.leaves(name, value)))
    shape = "x".join(str(size) for size in value.shape)
    return f"tensor {shape} {zlib.crc32(repr(sorted(parts.items())).encode()):08x}"


def _attributes(optimizer: Any) -> dict[str, Any]:
    """What the optimizer, and one that it wraps, keeps as attributes of its own."""
    found: dict[str, Any] = {}
    for one in (innermost(optimizer), optimizer):
        found.update({name: value for name, value in vars(one).items() if name not in _LISTED_ELSEWHERE})
    private = {name: value for name, value in found.items() if name.startswith("_")}
    public = {name: value for name, value in found.items() if name not in private}
    return {**public, **{name: _tensors(value) for name, value in private.items()}}


def _tensors(value: Any) -> list[Any]:
    """The tensors of a private attribute, which is a tensor or a list of them; of anything else none."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [part for part in value if isinstance(part, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _not_persistent(model: torch.nn.Module, backend: Backend) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, value in _of_module(module):
            key = _joined(prefix, name)
            if not backend.is_scaling_state(key):
                yield plain_name(key), value


# -- random generators ------------------------------------------------------------------------------------------------


def generators() -> dict[str, str]:
    """A digest of each random generator's state, by name."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch on the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    states["random"] = repr(random.getstate()).encode()
    kind, keys, *rest = np.random.get_state()
    states["numpy"] = repr((kind, np.asarray(keys).tolist(), rest)).encode()
    return {name: f"state {zlib.crc32(state):08x}" for name, state in states.items()}


@contextmanager
def generators_kept() -> Iterator[None]:
    """The generators are afterwards where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def buffers_kept(model: torch.nn.Module, besides: Container[torch.nn.Module] = ()) -> AbstractContextManager[None]:
    """The model's buffers are afterwards what they were: a forward pass in training moves running statistics. Those of
    the modules ``besides`` are left alone."""
    return _kept((module, name) for module in model.modules() if module not in besides for name in module._buffers)


def not_persistent_kept(model: torch.nn.Module) -> AbstractContextManager[None]:
    """The same for the buffers that the model declares as not persistent."""
    return _kept((module, name) for module in model.modules() for name, _ in _of_module(module))


@contextmanager
def _kept(buffers: Iterable[tuple[torch.nn.Module, str]]) -> Iterator[None]:
    """``buffers``: each with the module that holds it, which may put another tensor in its place."""
    held = [(module, name, buffer) for module, name in buffers if (buffer := module._buffers[name]) is not None]
    try:
        with values_kept(buffer for _, _, buffer in held):
            yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(module._non_persistent_buffers_set):
        value = module._buffers.get(name)
        if value is not None:
            yield name, value


# -- in pytest-fp8's own stores ---------------------------------------------------------------------------------------


def besides(optimizer: Any) -> dict[str, Any]:
    """What is data alone: entries of groups, what the optimizer's state dict has beside groups and states, attributes;
    and the schedule's state, ``None`` without a schedule."""
    inner, schedule = innermost(optimizer), schedule_of(optimizer)
    held = {} if isinstance(optimizer, ZeroOptimizer) else inner.state_dict()
    public = {name: value for name, value in vars(inner).items() if not name.startswith("_")}
    found = {
        "groups": [{name: value for name, value in group.items() if is_data(value)} for group in inner.param_groups],
        "more": {k: v for k, v in held.items() if k not in ("state", "param_groups") and is_data(v)},
        "attributes": {k: v for k, v in public.items() if k not in _LISTED_ELSEWHERE and is_data(v)},
    }
    # Each rank reads what rank 0 wrote.
    on_host: dict[str, Any] = with_tensors(found, torch.Tensor.cpu)
    return on_host | {"schedule": None if schedule is None else schedule_state(schedule)}


def put_back(optimizer: Any, kept_besides: Mapping[str, Any]) -> None:
    """Give attributes and schedule of :func:`besides` back, tensors into the tensors that the optimizer has."""
    inner, schedule = innermost(optimizer), schedule_of(optimizer)
    for name, value in kept_besides["attributes"].items():
        setattr(inner, name, _into(vars(inner).get(name), value))
    if schedule is None or kept_besides["schedule"] is None:
        return
    load_schedule_state(schedule, kept_besides["schedule"])
    if hasattr(schedule, "get_last_lr"):
        for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate


def is_data(value: Any, depth: int = 0) -> bool:
    """Whether a value is data alone. Parameters are not: they are the model's."""
    if depth > _DEEPEST:
        return False
    if type(value) in (list, tuple):
        return all(is_data(part, depth + 1) for part in value)
    if type(value) is dict:
        return all(is_data(part, depth + 1) for pair in value.items() for part in pair)
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _into(target: Any, value: Any) -> Any:
    """``value``, in the tensors of ``target`` where it has them in the same shapes: others may refer to them."""
    if isinstance(value, torch.Tensor):
        if not isinstance(target, torch.Tensor):
            return value
        if target.shape != value.shape:
            return value.to(target.device)
        with torch.no_grad():
            return target.copy_(value)
    if isinstance(value, list) and isinstance(target, list) and len(target) == len(value):
        target[:] = [_into(old, new) for old, new in zip(target, value, strict=True)]
        return target
    if isinstance(value, dict) and isinstance(target, dict):
        target.update({key: _into(target.get(key), new) for key, new in value.items()})
        return target
    return value
