"""Breakages on the roads through other libraries: what Accelerate and the Trainer do to weights, optimizer and ties."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_fp8.backends.base import Conversion
from pytest_fp8.backends.linears import broken_ties, plan, ties
from pytest_fp8.worker.fault_points import FaultPoints

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine


def renew_weights(engine: Engine, names: Iterable[str]) -> None:
    """Put a new parameter of the same values in place of each of these layers' weights, as ``convert_model`` does."""
    import torch

    for name in names:
        layer = engine.model.get_submodule(name)
        assert isinstance(layer.weight, torch.nn.Parameter)
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


class OptimizerMadeBefore(FaultPoints):
    """The conversion puts new parameters in place of those that the optimizer was made with."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        optimizer = engine.setup.optimizer(engine.model)
        meant = convert()
        renew_weights(engine, meant.converted)
        assert engine.prepared is not None
        engine.prepared.optimizer = optimizer
        return meant


class ModelNotPrepared(FaultPoints):
    """``accelerator.prepare`` is given the optimizer, and not the model."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        from accelerate import Accelerator
        from accelerate.utils import AORecipeKwargs

        meant = plan(engine.model)
        accelerator = Accelerator(
            cpu=engine.device.type == "cpu", mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]
        )
        accelerator.prepare(engine.setup.optimizer(engine.model))
        return meant


class TieBroken(FaultPoints):
    """The output projection gets a copy of the embedding that it was one with."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        tied = ties(engine.model)
        meant = convert()
        renew_weights(engine, ["lm_head"])
        meant.untied = broken_ties(tied, engine.model)
        return meant


class BaseUnfrozen(FaultPoints):
    """The converted layers get new parameters, which take gradients, whatever those did that they replace."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        meant = convert()
        renew_weights(engine, meant.converted)
        return meant
