"""Controls of the loss question: FP8 that ends on the way, weights that stand still, losses of another quantity, and a
reference from which nothing can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from pytest_fp8.codes import C, D

if TYPE_CHECKING:
    import torch


class OffAfterTenSteps(Control):
    """Each FP8 layer multiplies BF16 from step 10 of each curve on, and FP8 again in the next curve."""

    number, id = 64, "off-after-ten-steps"
    title = "FP8 is off after ten steps of each run"
    question = "loss"
    code = C.FP8_LOST
    about = "step 10"
    case = micro()

    def before_step(self, seed: int, step: int) -> None:
        for layer in self.fp8_layers():
            layer.__dict__.pop("forward", None)
            if step >= 10:
                layer.forward = _in_bfloat16(layer)


def _in_bfloat16(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    import torch.nn.functional as F

    return lambda given: F.linear(given, layer.weight, layer.bias)


class NothingLearns(Control):
    """After each step of the FP8 arm a callback puts the weights of the curve's start back."""

    number, id = 65, "nothing-learns"
    nightly = True
    title = "an arm in which no weight moves"
    question = "loss"
    code = C.WEIGHTS_STAND_STILL
    about = "an optimizer that steps other copies"
    case = micro()

    def build(self) -> None:
        self._start: list[torch.Tensor] = []
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self._start = [parameter.detach().clone() for parameter in self.model.parameters()]

    def stepped(self) -> None:
        for parameter, value in zip(self.model.parameters(), self._start, strict=False):
            parameter.data.copy_(value)


def with_rate(optimizer: torch.optim.Optimizer, rate: float) -> torch.optim.Optimizer:
    """The optimizer with this learning rate for all its parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


class OneWeightFrozen(Control):
    """The gradient of one FP8 layer's weight is zero. All others train, and the losses lie within the margin."""

    number, id = 66, "one-weight-frozen"
    title = "one layer's weight gets no gradient"
    question = "loss"
    code = C.WEIGHTS_STAND_STILL
    about = "1 of 21 weights"
    case = micro()

    def converted(self, model: Any) -> None:
        self.fp8_layers()[-1].weight.register_post_accumulate_grad_hook(_without_gradient)


def _without_gradient(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.zero_()


class TrainsTwice(Control):
    """From step 4 of a curve on, a callback of the FP8 arm trains each batch a second time, with an optimizer of its
    own: the arms' optimizers step equally often."""

    number, id = 67, "trains-twice"
    nightly = True
    title = "the FP8 arm trains each batch twice"
    question = "loss"
    code = C.LOWER
    case = micro()
    verdicts = ("INCONCLUSIVE",)

    def before_step(self, seed: int, step: int) -> None:
        import torch

        if step == 0:
            self._second = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if step < 3:
            return
        batch = self.setup.training_batch(seed, step)
        self.loss_of(self.model, batch).backward()
        self._second.step()
        self._second.zero_grad(set_to_none=True)


class WeightsInFp8(Control):
    """The weights are rounded to E4M3 after each step, as where FP8 copies take the master weights' place."""

    number, id = 68, "weights-in-fp8"
    nightly = True
    title = "the weights themselves are kept in FP8"
    question = "loss"
    code = D.OTHER_UPDATES
    about = "rounding of weights or gradients"
    case = micro()
    verdicts = ("INVALID",)

    def stepped(self) -> None:
        import torch

        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                scale = 448 / parameter.detach().abs().max().float().clamp(min=1e-12)
                rounded = (parameter.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale
                parameter.data.copy_(rounded)


class RateTooSmall(Control):
    """Both arms train at a learning rate at which 3 % of the bfloat16 weights can move."""

    number, id = 69, "rate-too-small"
    nightly = True
    title = "a learning rate that moves no bfloat16 weight"
    source = "[8B at rate 5e-6](findings.md#eight-billion-parameters-do-not-learn-in-a-minute)"
    question = "loss"
    code = C.SMALL_STEPS
    case = micro()
    verdicts = ("NOT_EXERCISED",)
    breaks = ("fp8", "bf16")

    def make_optimizer(self) -> torch.optim.Optimizer:
        return with_rate(super().make_optimizer(), 2e-6)


class MomentsCarryOn(Control):
    """Both arms' optimizers keep their moments from curve to curve, as where a step has an average of its own."""

    number, id = 119, "moments-carry-on"
    nightly = True
    title = "a curve begins with the moments of the last one"
    question = "loss"
    code = C.NOT_ANEW
    about = "it keeps something from one curve for the next"
    case = micro()
    verdicts = ("INVALID",)
    breaks = ("fp8", "bf16")

    def build(self) -> None:
        self._kept: dict[torch.Tensor, dict[str, Any]] = {}
        super().build()

    def before_step(self, seed: int, step: int) -> None:
        if step == 0:
            self.optimizer.state.update(self._kept)

    def stepped(self) -> None:
        self._kept = {weight: dict(entries) for weight, entries in self.optimizer.state.items()}


class BatchesCarryOn(Control):
    """Both arms draw on where the last curve ended, as from an iterator, and so do both arms' other questions."""

    number, id = 110, "batches-carry-on"
    title = "batches of an iterator that goes on"
    question = "loss"
    code = C.NOT_ANEW
    about = "goes on where the last curve left it"
    case = micro()
    verdicts = ("INVALID",)
    breaks = ("fp8", "bf16")

    _drawn = 0

    def training_batch(self, seed: int, step: int, whole: bool = False) -> Any:
        self._drawn += 1
        return super().training_batch(0, self._drawn, whole)
