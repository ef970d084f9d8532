"""The points at which an arm can be broken on purpose. A healthy arm has these, which change nothing.

The controls (:mod:`pytest_fp8.controls`) override them; nothing else may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_fp8.backends.base import Conversion
    from pytest_fp8.worker.engine import Engine
    from pytest_fp8.worker.recompute import Recompute

Precision = Callable[[], AbstractContextManager[Any]]


class FaultPoints:
    """Each method is called at one place, in the engine or in the checkpoint stores."""

    compiles = True
    """Whether a case that asks for ``torch.compile`` gets it."""

    def start(self, engine: Engine) -> None:
        """Before anything is built."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        """In place of the conversion; gives what the conversion was meant to do."""
        return convert()

    def precision(self, engine: Engine, precision: Precision) -> Precision:
        """The context around each forward pass."""
        return precision

    def checkpointing(self, engine: Engine, recompute: Recompute | None) -> tuple[Recompute | None, Mapping[str, Any]]:
        """What recomputes activations, ``None`` for torch's own, with further arguments of it."""
        return recompute, {}

    def warm(self, engine: Engine) -> None:
        """After the first training steps."""

    def batch(self, seed: int, step: int) -> tuple[int, int]:
        """The seed and step whose data a training step gets."""
        return seed, step

    def before_step(self, engine: Engine, seed: int, step: int) -> None:
        """Before each step of a loss curve."""

    def stepped(self, engine: Engine) -> None:
        """After each training step."""

    def stored(self, engine: Engine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What goes to disk as the weights."""
        return weights

    def fill(self, engine: Engine, weights: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> bool:
        """Load ``stored`` (keys as they are on disk) in place of the arm's own loading; whether that was done."""
        return False

    def loads_optimizer(self) -> bool:
        """Whether a stored optimizer state is loaded."""
        return True
