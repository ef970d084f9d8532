"""Notes few values of what each module gives in a step: the first one that differs between the arms is then known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.floats import in_text
from pytest_fp8.worker.answers.instrumented import Observer
from pytest_fp8.worker.tensors import plain_name
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

VALUES = 256
"""Of each module's output: a relative difference is then known to about 6 %."""


class OutputWatch(Observer):
    """The first call of each module."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._values: dict[str, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._hook(plain_name(name)))
            for name, module in self._engine.model.named_modules()
        ]
        with hooked(handles):
            yield

    def noted(self) -> dict[str, str]:
        """The field ``outputs`` of :class:`pytest_fp8.questions.numerics.evidence.ArmNumerics`."""
        return {name: in_text(values.cpu().numpy()) for name, values in self._values.items()}

    def _hook(self, name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            made = next(tensors_in(output), None)
            if name in self._values or type(made) is not torch.Tensor or made.is_nested or made.is_sparse:
                return
            if not made.is_floating_point() or not made.numel():
                return
            with torch.no_grad(), _disable_current_modes():
                places = torch.randint(made.numel(), (VALUES,), generator=torch.Generator().manual_seed(made.numel()))
                self._values[name] = made.detach().reshape(-1)[places.to(made.device)].float()

        return after
