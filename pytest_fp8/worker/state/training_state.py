"""Random generators and buffers: listed, and afterwards what they were."""

from __future__ import annotations

import random
import zlib
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from pytest_fp8.worker.training.restored import values_kept


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


def not_persistent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of each buffer that the model declares as not persistent."""
    for prefix, module in model.named_modules():
        for name, value in _of_module(module):
            yield f"{prefix}.{name}" if prefix else name, value


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
