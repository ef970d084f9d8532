"""Follows one curve beside its losses: what the optimizer did and keeps, what moved without it, what is left over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.questions.loss.evidence import Course
from pytest_fp8.worker.fused_params import plain_name, split, trained
from pytest_fp8.worker.ledger_modules import dtype_name
from pytest_fp8.worker.movement import sample
from pytest_fp8.worker.phases import innermost


class TrainingCourse:
    """Watches an arm from when it is made, at the start of a curve, to :meth:`noted`, at its end."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, fused: FusedParams) -> None:
        self._model, self._optimizer, self._fused = model, optimizer, fused
        stepped = set(trained(model, optimizer, fused))
        self._start = {name: sample(value).clone() for name, value in self._tensors() if name not in stepped}
        self._rates = [self._rates_now()]
        self._stepped: list[int] = []
        self._now = 0
        # Steps, and no calls of a closure: how often a line search asks depends on the losses.
        self._hook = innermost(optimizer).register_step_pre_hook(self._note_optimizer_step)

    def _note_optimizer_step(self, *_: Any) -> None:
        self._now += 1

    def note_training_step(self) -> None:
        """Called after each training step."""
        self._stepped.append(self._now)
        self._now = 0
        self._rates.append(self._rates_now())

    def noted(self) -> Course:
        self._hook.remove()
        live = self._model.named_parameters(remove_duplicate=False)
        gradients = [(name, p.grad) for name, p in live if p.grad is not None and not p.grad.is_sparse]
        left = [(part, gradient) for name, gradient in gradients for part, gradient in self._parts(name, gradient)]
        return Course(
            rates=self._rates,
            stepped=self._stepped,
            state=self._state(),
            left=sorted(name for name, gradient in left if bool(sample(gradient).any())),
            alone={name: bool((sample(value) != self._start[name]).any()) for name, value in self._kept()},
        )

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((n, v) for n, v in self._tensors() if n in self._start and len(sample(v)) == len(self._start[n]))

    def _rates_now(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups() if "lr" in group]

    def _groups(self) -> list[dict[str, Any]]:
        return innermost(self._optimizer).param_groups

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
        for name, value in (*self._model.named_parameters(), *self._model.named_buffers()):
            yield from self._parts(name, value)

    def _parts(self, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        return ((plain_name(part), tensor) for part, tensor in split([(name, value)], self._fused))
