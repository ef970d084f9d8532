"""Controls of the ledger: arms that differ in more than FP8, and conversions that change more than the precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from controls.control import Control, micro
from controls.models import LOOPED, RECOMPUTING
from pytest_fp8.codes import D, L

if TYPE_CHECKING:
    import torch

OTHER_WORK = "other work in one arm"
LOOP = micro(model="own", steps=3, seeds=1)


class ChangedBeside(Control):
    """A model with a loop of its own, which one arm changes right after the conversion, as a ``convert`` may."""

    workload = LOOPED
    case = LOOP
    question = "layers"
    verdicts: ClassVar[tuple[str, ...]] = ("INVALID",)


class HalfTheBatch(ChangedBeside):
    """The FP8 arm's step takes the first half of each batch: 1.96 times as fast on an H200."""

    number, id = 36, "half-batch-step"
    title = "the FP8 arm's step trains on half of each batch"
    code = D.OTHER_WORK

    def converted(self, model: Any) -> None:
        model.does = "half in the step"


class HalfInTheForwardPass(ChangedBeside):
    """The model itself drops half of the rows once it is converted, so that the same batch enters both arms."""

    number, id = 37, "half-batch-forward"
    nightly = True
    title = "the converted model drops half of its rows"
    question = "loss"
    code = D.OTHER_WORK

    def converted(self, model: Any) -> None:
        model.does = "half in the forward pass"


class Tf32InOneArm(ChangedBeside):
    """``convert`` switches TF32 on: 2.88 times as fast on an H200 where the rest is float32."""

    number, id = 38, "tf32-one-arm"
    title = "TF32 is switched on in the FP8 arm alone"
    code = D.OTHER_SWITCH

    def converted(self, model: Any) -> None:
        import torch

        torch.set_float32_matmul_precision("high")


class ReferenceWaits(ChangedBeside):
    """The reference reads its loss in each step and waits for it: 1.49 times on an H200, of nothing."""

    number, id = 39, "reference-waits"
    title = "the reference waits for its own logging"
    code = D.OTHER_WAITS
    breaks = ("bf16",)

    def converted(self, model: Any) -> None:
        model.does = "logs"


class WeightScaled(ChangedBeside):
    """One weight is 1 % larger after the conversion."""

    number, id = 40, "weight-scaled"
    title = "the conversion scales a weight by 1.01"
    code = L.WEIGHT_CHANGED
    verdicts = ("FAIL",)

    def converted(self, model: Any) -> None:
        import torch

        with torch.no_grad():
            model.blocks[0].up.weight.mul_(1.01)


class BiasDropped(ChangedBeside):
    """One layer has no bias after the conversion."""

    number, id = 41, "bias-dropped"
    title = "the conversion drops a bias"
    code = L.WEIGHT_GONE
    verdicts = ("FAIL",)

    def converted(self, model: Any) -> None:
        model.blocks[1].down.bias = None


class DropoutOff(ChangedBeside):
    """Dropout has the rate 0 in the FP8 arm, which learns a batch faster for it."""

    number, id = 42, "dropout-off"
    nightly = True
    title = "dropout is off in the FP8 arm alone"
    question = "loss"
    code = D.OTHER_WORK

    def converted(self, model: Any) -> None:
        for block in model.blocks:
            block.drop.p = 0.0


class Fp8ArmInEval(ChangedBeside):
    """The FP8 arm trains in eval mode."""

    number, id = 43, "fp8-arm-in-eval"
    title = "the FP8 arm trains in eval mode"
    question = "loss"
    code = D.OTHER_MODE

    def converted(self, model: Any) -> None:
        model.eval()


class LayerBypassed(ChangedBeside):
    """A block of the converted model multiplies with a layer's weight itself."""

    number, id = 44, "layer-bypassed"
    title = "the converted model goes past one of its layers"
    code = L.PASSED_BY
    verdicts = ("FAIL",)

    def converted(self, model: Any) -> None:
        from torch.nn.functional import linear

        block = model.blocks[1]

        def inner(x: torch.Tensor) -> Any:
            hidden = block.drop(block.act(block.up(block.norm(x))))
            return linear(hidden, block.down.weight, block.down.bias)

        block.inner = inner


class OtherRate(Control):
    """The FP8 arm's optimizer has another learning rate."""

    number, id = 45, "other-rate"
    title = "the FP8 arm trains at another learning rate"
    question = "loss"
    code = D.OTHER_OPTIMIZER
    case = micro(steps=3, seeds=1)
    verdicts = ("INVALID",)

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        for group in made.param_groups:
            group["lr"] *= 1.5
        return made


class ClipsAlone(ChangedBeside):
    """The reference clips its gradients, the FP8 arm does not."""

    number, id = 46, "clips-alone"
    nightly = True
    title = "one arm clips its gradients"
    question = "loss"
    code = D.OTHER_WORK
    breaks = ("bf16",)

    def converted(self, model: Any) -> None:
        model.does = "clips"


class HeadInFloat32(ChangedBeside):
    """The FP8 arm computes its output projection in float32."""

    number, id = 47, "head-float32"
    title = "the rest of the FP8 arm runs in float32"
    code = D.OTHER_PRECISION

    def converted(self, model: Any) -> None:
        from torch.nn.functional import linear

        head = model.lm_head
        head.forward = lambda x: linear(x.float(), head.weight.float(), head.bias.float())


class RecomputesAlone(ChangedBeside):
    """The FP8 arm recomputes its activations, the reference keeps them."""

    number, id = 48, "recomputes-alone"
    title = "one arm recomputes its activations"
    code = D.OTHER_RECOMPUTATION

    def converted(self, model: Any) -> None:
        for block in model.blocks:
            block.recomputes = True


class RecomputesOtherwise(ChangedBeside):
    """Both arms recompute; the FP8 arm does so with other random numbers, so with another dropout mask."""

    number, id = 90, "recomputes-otherwise"
    title = "recomputation draws another dropout mask"
    code = D.RECOMPUTED_OTHERWISE
    verdicts = ("FAIL",)
    workload = RECOMPUTING

    def converted(self, model: Any) -> None:
        for block in model.blocks:
            block.preserves = False


class OtherMicroBatches(ChangedBeside):
    """The reference takes four micro-batches, the FP8 arm two."""

    number, id = 49, "micro-batches"
    nightly = True
    title = "the arms split a batch into other micro-batches"
    code = D.OTHER_WORK
    breaks = ("bf16",)

    def converted(self, model: Any) -> None:
        model.does = "four micro-batches"
