"""Follows one curve beside its losses: what the optimizer did and keeps, which tensors moved, what is left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.questions.loss.evidence import Course, Moved
from pytest_fp8.worker.tensors import plain_name, split, trained
from pytest_fp8.worker.training import zero
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.worker.watch.operators import dtype_name

SAMPLE = 2**16
"""Elements looked at of each tensor, evenly spread. The standard error of a share is below 0.002; at 8B the copies are
38 MB of bfloat16."""


class TrainingCourse:
    """Watches an arm from when it is made, at the start of a curve, to :meth:`noted` and :meth:`movement`, at its end.

    Tensors go by plain names. Of each a sample is kept; of one that is sharded, of this rank's part.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, fused: FusedParams) -> None:
        self._model, self._optimizer, self._fused = model, optimizer, fused
        self._start = {name: sample(value).clone() for name, value in self._tensors()}
        self._reached = {
            name: torch.zeros_like(self._start[name], dtype=torch.bool)
            for name in trained(model, optimizer, fused)
            if name in self._start
        }
        """Of what the optimizer steps: elements that had a gradient other than 0."""
        self._rates = [self._rates_now()]
        self._stepped: list[int] = []
        self._now = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around all steps of the curve."""
        # Steps, and no calls of a closure: how often a line search asks depends on the losses.
        with hooked([innermost(self._optimizer).register_step_pre_hook(self._note_optimizer_step)]):
            yield

    def _note_optimizer_step(self, *_: Any) -> None:
        self._now += 1

    def note_gradients(self) -> None:
        """Called before each step of the optimizer, and after each call of its closure."""
        for name, gradient in (*self._gradients(), *self._partitioned(zero.part_of_gradient)):
            if name in self._reached:
                self._reached[name] |= sample(gradient) != 0

    def note_training_step(self) -> None:
        """Called after each training step."""
        self._stepped.append(self._now)
        self._now = 0
        self._rates.append(self._rates_now())

    def noted(self) -> Course:
        return Course(
            rates=self._rates,
            stepped=self._stepped,
            state=self._state(),
            left=sorted(name for name, gradient in self._gradients() if bool(sample(gradient).any())),
            alone={name: bool(moved.any()) for name, _, moved in self._moved() if name not in self._reached},
        )

    def movement(self) -> dict[str, Moved]:
        """Of what the optimizer steps."""
        return {
            name: Moved(elements=elements, moved=_share(moved), reached=_share(self._reached[name]))
            for name, elements, moved in self._moved()
            if name in self._reached
        }

    def _moved(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, elements, which of its sample differ from the start) of each tensor that has its size of then."""
        for name, value in self._tensors():
            now, start = sample(value), self._start.get(name)
            if start is not None and len(now) == len(start):
                yield name, value.numel(), now != start

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for group in innermost(self._optimizer).param_groups if group.get("lr") is not None]

    def _state(self) -> dict[str, str]:
        """Parameter -> the tensors of more than one element that the optimizer keeps for it, with their type."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found: dict[str, str] = {}
        for parameter, entries in innermost(self._optimizer).state.items():
            if id(parameter) not in names or not isinstance(entries, dict):
                continue
            kept = {
                str(key): dtype_name(value)
                for key, value in entries.items()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            }
            words = ", ".join(f"{key} {dtype}" for key, dtype in sorted(kept.items()))
            found.update((part, words) for part, _ in self._parts(names[id(parameter)], parameter))
        return found

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in (*self._model.named_parameters(remove_duplicate=False), *self._model.named_buffers()):
            if not zero.is_partitioned(value):
                yield from self._parts(name, value)
        yield from self._partitioned(zero.part)

    def _partitioned(self, part: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        """What ZeRO-3 holds in parts: this rank's, flat, so that the rows of a fused parameter cannot be told."""
        for name, value in self._model.named_parameters(remove_duplicate=False):
            mine = part(value) if zero.is_partitioned(value) and name not in self._fused else None
            if mine is not None:
                yield plain_name(name), mine

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._model.named_parameters(remove_duplicate=False):
            if value.grad is not None and not value.grad.is_sparse:
                yield from self._parts(name, value.grad)

    def _parts(self, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return ((plain_name(part), tensor) for part, tensor in split([(name, value)], self._fused))


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """At most about :data:`SAMPLE` elements, evenly spread."""
    while is_traceable_wrapper_subclass(tensor):
        # torchao's wrapper of a weight keeps the weight itself first; a weight that is stored in FP8, its FP8 values,
        # and it knows no reshape.
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and flat.element_size() == 1:
        flat = flat.view(torch.uint8)
    # An odd stride meets every column of a matrix whose width is a power of two.
    return flat[:: max(1, flat.numel() // SAMPLE) | 1]


def _share(flags: torch.Tensor) -> float:
    return float(flags.float().mean()) if flags.numel() else 0.0
