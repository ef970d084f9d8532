"""Controls of saving and loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from controls.control import Control, micro
from pytest_fp8.worker.fault_points import BreakableEngine

if TYPE_CHECKING:
    import torch


class StoredInFp8(Control):
    """The converted layers' weights are saved as e4m3."""

    number, id = 19, "stored-in-fp8"
    title = "weights stored in FP8"
    question, cause = "checkpoints", "weights were stored in FP8"
    case = micro()

    def stored(self, engine: BreakableEngine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        converted = {f"{name}.weight" for name in engine.conversion.converted}
        return {name: w.to(torch.float8_e4m3fn) if name in converted else w for name, w in weights.items()}


class LoadedIntoNothing(Control):
    """The state dict of the compiled wrapper is saved, whose keys begin with ``_orig_mod.``. ``load_state_dict`` with
    ``strict=False`` then matches none of them."""

    number, id = 20, "prefixed-keys"
    title = "prefixed keys loaded into nothing"
    question, cause = "checkpoints", "the checkpoint was loaded into nothing"
    case = micro()
    breaks = ("fp8", "bf16")

    def stored(self, engine: BreakableEngine, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"_orig_mod.{name}": value for name, value in weights.items()}

    def fill(
        self, engine: BreakableEngine, weights: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]
    ) -> bool:
        from pytest_fp8.worker.checkpoint_stores import MODEL, OPTIMIZER

        state = {name.removeprefix(MODEL): v for name, v in stored.items() if not name.startswith(OPTIMIZER)}
        engine.model.load_state_dict(state, strict=False)
        return True


class OptimizerNotLoaded(Control):
    """Weights are loaded; the stored optimizer state is not read."""

    number, id = 21, "optimizer-lost"
    title = "weights loaded, optimizer not"
    question, cause = "checkpoints", "weights were loaded and the optimizer was not"
    case = micro()

    def loads_optimizer(self) -> bool:
        return False
