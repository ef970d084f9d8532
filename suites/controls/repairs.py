"""Controls of faults that are rare, of a step or two, or outside the products: in curves, gradients, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from controls.course import build_student, follow, rows
from controls.ledger import ChangedBeside
from controls.loss import _in_bfloat16
from controls.models import LOOPED, TIED
from pytest_fp8.case import Case
from pytest_fp8.codes import C, D, K, N
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch


STUDENT = Workload(build=build_student, batch=rows, step=follow, leave=("teacher",), learning_rate=2e-3)
BIASED = Case("own", "torchao", "tensorwise", name="student", emulated=True, steps=20)


class OffInTwoSteps(Control):
    """Each FP8 layer multiplies BF16 in steps 3 and 7 of each curve, as a guard against outliers has it."""

    number, id = 91, "off-in-two-steps"
    nightly = True
    title = "FP8 is off in two steps in the middle of each run"
    question = "loss"
    code = C.FP8_LOST
    about = "in 2 of 20 steps: 3, 7"
    case = micro()

    def before_step(self, seed: int, step: int) -> None:
        for layer in self.fp8_layers():
            layer.__dict__.pop("forward", None)
            if step in (3, 7):
                layer.forward = _in_bfloat16(layer)


class RareTile(Control):
    """Every 41st call of an FP8 layer leaves a quarter of its output zero, as in a race."""

    number, id = 92, "rare-tile"
    nightly = True
    title = "one call in 41 loses a tile of its output"
    question = "loss"
    code = C.RARE_PRODUCT
    case = micro()

    def converted(self, model: Any) -> None:
        self._calls = 0
        for layer in self.fp8_layers():
            layer.forward = self._losing(layer.forward)

    def _losing(self, own: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        import torch

        def forward(given: torch.Tensor) -> torch.Tensor:
            output = own(given)
            self._calls += 1
            if self._calls % 41:
                return output
            written = torch.ones_like(output)
            written[..., : output.shape[-2] // 2, : output.shape[-1] // 2] = 0
            return output * written

        return forward


class BiasTwice(Control):
    """One layer adds its bias a second time. The product itself is right."""

    number, id = 93, "bias-twice"
    nightly = True
    title = "one layer adds its bias twice"
    question = "numerics"
    code = N.WRONG_BIAS
    case = BIASED
    workload = STUDENT

    def converted(self, model: Any) -> None:
        layer = self.fp8_layers()[0]
        own = layer.forward
        layer.forward = lambda given: own(given) + layer.bias


class BiasMean(Control):
    """The gradient of each FP8 layer's bias is the mean over sixteen rows in place of their sum."""

    number, id = 94, "bias-gradient-mean"
    title = "gradients of biases are means and not sums"
    question = "numerics"
    code = N.BIAS_GRADIENT
    case = BIASED
    workload = STUDENT

    def converted(self, model: Any) -> None:
        for layer in self.fp8_layers():
            layer.bias.register_hook(lambda gradient: gradient / 16)


class WeightGradientInE4m3(Control):
    """Gradients of the FP8 layers' weights are kept in E4M3 without a scale: small ones become zero."""

    number, id = 95, "weight-gradient-e4m3"
    nightly = True
    title = "weight gradients are kept in E4M3 without a scale"
    question = "numerics"
    code = N.GRADIENT_STORED
    case = BIASED
    workload = STUDENT

    def converted(self, model: Any) -> None:
        import torch

        for layer in self.fp8_layers():
            layer.weight.register_hook(lambda gradient: gradient.to(torch.float8_e4m3fn).to(gradient.dtype))


class SeedsAgain(ChangedBeside):
    """Each call of a block's first FP8 layer seeds torch's generator, so that dropout masks repeat."""

    number, id = 96, "seeds-again"
    title = "a layer of the FP8 arm seeds the generator again"
    code = D.OTHER_RANDOM_NUMBERS
    about = "the generator was seeded again inside the step"
    workload = LOOPED

    def converted(self, model: Any) -> None:
        for block in model.blocks:
            block.up.register_forward_pre_hook(_seed)


def _seed(*_: Any) -> None:
    import torch

    torch.manual_seed(3)


class EpsilonOfAnOwnNorm(ChangedBeside):
    """The norms of the FP8 arm, whose class is the user's own, have another epsilon."""

    number, id = 97, "epsilon-of-an-own-norm"
    title = "another epsilon in the FP8 arm's norms"
    code = D.OTHER_OPERATOR_SETTING
    about = "the epsilon of a norm"

    def converted(self, model: Any) -> None:
        import torch

        class Norm(torch.nn.LayerNorm):
            pass

        for block in model.blocks:
            block.norm.__class__ = Norm
            block.norm.eps = 0.02


def _shifted(step: int) -> torch.Tensor:
    import torch

    return torch.randn(128, 32) + 0.5


class OtherNorm(Control):
    """The norms of the FP8 arm do not subtract the mean."""

    number, id = 98, "other-norm"
    nightly = True
    title = "another norm in the FP8 arm"
    question = "numerics"
    code = D.OTHER_WORK
    about = "operators of blocks.0.norm"
    case = micro(model="own", steps=3, seeds=1)
    workload = Workload(build=LOOPED.build, batch=_shifted, step=LOOPED.step)

    def converted(self, model: Any) -> None:
        from torch.nn.functional import rms_norm

        for block in model.blocks:
            norm = block.norm
            norm.forward = lambda x, norm=norm: 3 * rms_norm(x, norm.normalized_shape, norm.weight) + norm.bias


class TiedWeightsTrainApart(Control):
    """The conversion copies the weight of the output projection, which was the embedding, and the optimizer steps both
    copies."""

    number, id = 99, "tied-weights-train-apart"
    nightly = True
    title = "tied weights become two, and both are trained"
    question = "checkpoints"
    code = K.UNTIED
    about = "the model was untied"
    case = micro(model="own")
    workload = TIED

    def converted(self, model: Any) -> None:
        import torch

        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
