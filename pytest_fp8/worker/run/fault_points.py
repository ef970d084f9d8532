"""The points at which an arm can be broken on purpose: which there are, and when each is called.

A healthy arm has :class:`FaultPoints`, which changes nothing. A control overrides what it breaks;
the arm's spec names the control's class by import path, and :func:`fault_points_of` makes it. Nothing else may
override a fault point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import contextlib

    import torch

    from pytest_fp8.backends.base import Backend, Conversion
    from pytest_fp8.case import Case
    from pytest_fp8.worker.training.parallel import Parallel
    from pytest_fp8.worker.training.recompute import Recompute
    from pytest_fp8.worker.training.setup import TrainingSetup
    from pytest_fp8.zoo.training import LossFunction

Precision = Callable[[], AbstractContextManager[Any]]
SaveOrLoad = Callable[[Any, Any, Any], Any]
"""``save(model, optimizer, folder)`` or ``load(model, optimizer, folder)``."""


class BreakableEngine(Protocol):
    """What a fault point may use of the engine that calls it."""

    case: Case
    device: torch.device
    backend: Backend
    setup: TrainingSetup
    attention: contextlib.ExitStack
    model: torch.nn.Module
    conversion: Conversion
    loss_of: LossFunction
    optimizer: torch.optim.Optimizer

    def training_batch(self, seed: int, step: int) -> Any: ...


class FaultPoints:
    """Each method is called at one place, in the engine or in the checkpoint stores. Listed in the order of an arm's
    life: while it is built, while it trains, while it saves and loads."""

    compiles = True
    """Whether a case that asks for ``torch.compile`` gets it."""

    def start(self, engine: BreakableEngine) -> None:
        """Called before anything is built: there is no model yet."""

    def convert(self, engine: BreakableEngine, convert: Callable[[], Conversion]) -> Conversion:
        """Called in place of the conversion, which is ``convert``. Returns what the conversion was meant to do."""
        return convert()

    def precision(self, engine: BreakableEngine, precision: Precision) -> Precision:
        """Called after the conversion. Returns what makes the context around each forward pass."""
        return precision

    def checkpointing(
        self, engine: BreakableEngine, recompute: Recompute | None
    ) -> tuple[Recompute | None, Mapping[str, Any]]:
        """Called before activation checkpointing is switched on. Returns the function that recomputes activations
        (``None``: torch's own) and further arguments for it."""
        return recompute, {}

    def parallel(self, engine: BreakableEngine, parallelize: Callable[[], Parallel]) -> Parallel:
        """Called before the optimizer is made, in place of parallelizing the model, which is ``parallelize``."""
        return parallelize()

    def optimizer(self, engine: BreakableEngine, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Called after the conversion, in place of making the optimizer, which is ``make``."""
        return make()

    def warm(self, engine: BreakableEngine) -> None:
        """Called once, after the first training steps."""

    def batch(self, seed: int, step: int) -> tuple[int, int]:
        """Called for each training step. Returns the seed and the step whose data it gets."""
        return seed, step

    def before_step(self, engine: BreakableEngine, seed: int, step: int) -> None:
        """Called before each step of a loss curve."""

    def stepped(self, engine: BreakableEngine) -> None:
        """Called after each training step."""

    def stored(self, engine: BreakableEngine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Called when a checkpoint is saved. Returns the weights that are written, by name."""
        return weights

    def fill(
        self, engine: BreakableEngine, weights: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
    ) -> bool:
        """Called when a checkpoint is loaded. ``stored``: the weights, by their keys on disk. Returns whether this has
        loaded the weights; otherwise the arm does."""
        return False

    def own_functions(self, save: SaveOrLoad, load: SaveOrLoad) -> tuple[SaveOrLoad, SaveOrLoad]:
        """Called when a checkpoint goes through the workload's own functions. Returns those that are called."""
        return save, load

    def loads_optimizer(self) -> bool:
        """Called when a checkpoint is loaded. Returns whether the stored optimizer state is loaded, too."""
        return True


def fault_points_of(control: str | None) -> FaultPoints:
    """The fault points of an arm. ``control`` is ``module:Class``, or ``None`` for an arm that nothing breaks.

    Raises ``ImportError`` or ``AttributeError`` where this process cannot import it.
    """
    if control is None:
        return FaultPoints()
    module, _, name = control.partition(":")
    points: FaultPoints = getattr(import_module(module), name)()
    return points
