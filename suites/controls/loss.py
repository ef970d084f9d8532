"""Controls of the loss question: FP8 that ends on the way, weights that stand still, losses of another quantity, and a
reference from which nothing can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from controls.execution import fp8_layers
from pytest_fp8.case import Case
from pytest_fp8.worker.fault_points import BreakableEngine
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch

    from pytest_fp8.backends.base import Conversion

OURS = "found by trying faults on this gate"


class OffAfterTenSteps(Control):
    """Each FP8 layer multiplies BF16 from step 11 of each curve on, and FP8 again in the next curve."""

    number, id = 64, "off-after-ten-steps"
    title = "FP8 is off after ten steps of each run"
    source = OURS
    question, cause = "loss", "FP8 ran in step 1 and not in step 20"
    case = micro()

    def before_step(self, engine: BreakableEngine, seed: int, step: int) -> None:
        for layer in fp8_layers(engine):
            layer.__dict__.pop("forward", None)
            if step >= 10:
                layer.forward = _in_bfloat16(layer)


def _in_bfloat16(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    import torch.nn.functional as F

    return lambda given: F.linear(given, layer.weight, layer.bias)


class NothingLearns(Control):
    """The FP8 arm's optimizer has a learning rate of 0."""

    number, id = 65, "nothing-learns"
    title = "an arm in which no weight moves"
    source = OURS
    question, cause = "loss", "an optimizer that steps other copies"
    case = micro()

    def optimizer(self, engine: BreakableEngine, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        return with_rate(make(), 0.0)


def with_rate(optimizer: torch.optim.Optimizer, rate: float) -> torch.optim.Optimizer:
    """The optimizer with this learning rate for all its parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    return optimizer


class OneWeightFrozen(Control):
    """The gradient of one FP8 layer's weight is zero. All others train, and the losses lie within the margin."""

    number, id = 66, "one-weight-frozen"
    title = "one layer's weight gets no gradient"
    source = OURS
    question, cause = "loss", "1 of 21 weights do not train in the FP8 arm"
    case = micro()

    def convert(self, engine: BreakableEngine, convert: Callable[[], Conversion]) -> Conversion:
        meant = convert()
        fp8_layers(engine)[-1].weight.register_post_accumulate_grad_hook(_without_gradient)
        return meant


def _without_gradient(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.zero_()


class MeanOverFewerTokens(Control):
    """From step 2 on the FP8 arm's mean leaves out the fifth of the tokens with the highest losses, as a mean does that
    masks the tokens whose loss is NaN."""

    number, id = 67, "fewer-tokens"
    title = "the mean masks a fifth of the tokens"
    source = "nanmean over a batch with NaN losses"
    question, cause = "loss", "a mean over fewer tokens in the FP8 arm"
    case = micro()
    verdicts = ("INCONCLUSIVE",)

    share = 0.2

    def before_step(self, engine: BreakableEngine, seed: int, step: int) -> None:
        engine.loss_of = self._masked if step else self._whole

    def _whole(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return self._losses(model, batch).mean()

    def _masked(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        losses = self._losses(model, batch)
        return losses.sort().values[: int(len(losses) * (1 - self.share))].mean()

    @staticmethod
    def _losses(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        import torch.nn.functional as F

        logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1).float()
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="none")


def build_with_dropout() -> torch.nn.Module:
    """Two layers with dropout between them, and 64 classes."""
    from torch import nn

    first = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.3)]
    return nn.Sequential(*first, nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.3), nn.Linear(256, 64))


def classes(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """128 random rows, and the index of the largest of each."""
    import torch

    rows = torch.randn(128, 64)
    return rows, rows.argmax(1)


def class_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    import torch.nn.functional as F

    rows, labels = batch
    return F.cross_entropy(model(rows).float(), labels)


class DropoutOff(Control):
    """The FP8 arm's dropout drops nothing, as after a conversion that leaves the model in eval()."""

    number, id = 68, "dropout-off"
    title = "dropout is off in the FP8 arm"
    source = OURS
    question, cause = "loss", "dropout or another regularisation that is off"
    case = Case("own", "torchao", "tensorwise", name="dropout", emulated=True)
    workload = Workload(build=build_with_dropout, batch=classes, loss=class_loss)
    verdicts = ("INCONCLUSIVE",)

    def warm(self, engine: BreakableEngine) -> None:
        import torch

        for module in engine.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0


class RateTooSmall(Control):
    """Both arms train at a learning rate at which 3 % of the bfloat16 weights can move."""

    number, id = 69, "rate-too-small"
    title = "a learning rate that moves no bfloat16 weight"
    source = "8B at rate 5e-6: 7.7 % of the weights move"
    question, cause = "loss", "too few weights move in BF16"
    case = micro()
    verdicts = ("NOT_EXERCISED",)
    breaks = ("fp8", "bf16")

    def optimizer(self, engine: BreakableEngine, make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        return with_rate(make(), 2e-6)
