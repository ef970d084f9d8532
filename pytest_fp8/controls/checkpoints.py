"""Breakages of saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_fp8.worker.fault_points import FaultPoints

if TYPE_CHECKING:
    import torch

    from pytest_fp8.worker.engine import Engine


class StoredInFp8(FaultPoints):
    """The layers' FP8 copies are saved in place of their weights."""

    def stored(self, engine: Engine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        converted = {f"{name}.weight" for name in engine.conversion.converted}
        return {name: w.to(torch.float8_e4m3fn) if name in converted else w for name, w in weights.items()}


class LoadedIntoNothing(FaultPoints):
    """The wrapper's state dict is saved, prefix and all; ``strict=False`` then finds a home for none of its keys."""

    def stored(self, engine: Engine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"_orig_mod.{name}": value for name, value in weights.items()}

    def fill(self, engine: Engine, weights: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> bool:
        from pytest_fp8.worker.checkpoint_stores import MODEL, OPTIMIZER

        state = {name.removeprefix(MODEL): v for name, v in stored.items() if not name.startswith(OPTIMIZER)}
        engine.model.load_state_dict(state, strict=False)
        return True


class OptimizerNotLoaded(FaultPoints):
    """Weights are loaded; the optimizer starts from nothing."""

    def loads_optimizer(self) -> bool:
        return False
