"""Controls of what Accelerate and the Trainer do around a conversion: to weights, to the optimizer and to ties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from controls.control import ACCELERATE, Control, micro
from controls.models import ADAPTERS, TIED
from pytest_fp8.codes import K, L

if TYPE_CHECKING:
    import torch

    from pytest_fp8.backends.base import Conversion


def renew_weights(layers: Iterable[Any]) -> None:
    """Put a new parameter of the same values in place of each of these layers' weights, as ``convert_model`` does."""
    import torch

    for layer in layers:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())


class OptimizerMadeBefore(Control):
    """The optimizer is made first. The conversion then puts new parameters in place of those that it knows."""

    number, id = 29, "optimizer-too-early"
    nightly = True
    title = "the optimizer knows the weights from before the conversion"
    source = f"[Accelerate, AORecipeKwargs]({ACCELERATE}/utils/dataclasses.py)"
    question = "loss"
    code = L.NOT_IN_OPTIMIZER
    case = micro()

    def convert(self) -> Conversion:
        self._made = self.setup.optimizer(self.model)
        return super().convert()

    def converted(self, model: Any) -> None:
        renew_weights(self.fp8_layers())

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self._made


class ModelNotPrepared(Control):
    """``accelerator.prepare`` is given the optimizer alone, and not the model."""

    number, id = 30, "model-unprepared"
    title = "Accelerate trains in fp8, the model was never given to it"
    source = f"[Accelerate, Accelerator.prepare]({ACCELERATE}/accelerator.py)"
    question = "layers"
    code = L.NOTHING_CONVERTED
    case = micro()
    needs = ("accelerate",)

    def convert(self) -> Conversion:
        from accelerate import Accelerator
        from accelerate.utils import AORecipeKwargs

        from pytest_fp8.backends.linears import plan

        meant = plan(self.model)
        accelerator = Accelerator(
            cpu=self.device.type == "cpu", mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()]
        )
        accelerator.prepare(self.setup.optimizer(self.model))
        return meant


class TieBroken(Control):
    """The output projection, which was the embedding, gets a copy of it in the conversion."""

    number, id = 31, "tie-broken"
    title = "a tied head becomes a weight of its own"
    source = f"[Accelerate, convert_model copies the weight]({ACCELERATE}/utils/transformer_engine.py)"
    question = "checkpoints"
    code = K.UNTIED
    about = "the model was untied"
    case = micro(model="own", resume=False)
    workload = TIED

    def converted(self, model: Any) -> None:
        renew_weights([model.lm_head])


class BaseUnfrozen(Control):
    """The converted weights are new parameters, which take gradients even where the replaced ones took none."""

    number, id = 33, "base-unfrozen"
    nightly = True
    title = "the frozen base under adapters takes gradients again"
    source = f"[Accelerate, convert_model]({ACCELERATE}/utils/transformer_engine.py)"
    question = "layers"
    code = L.TRAINS_FROZEN
    case = micro(model="own")
    workload = ADAPTERS
    needs = ("peft",)

    def converted(self, model: Any) -> None:
        renew_weights(self.fp8_layers())
