"""Controls of faults that hide where nobody looks: at a tensor's edge, in each second step, in evaluations, behind a
function that says FP8 and casts nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from controls.numerics import WrongBackward
from pytest_fp8.case import Case
from pytest_fp8.codes import C, D, N
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch


def build_wide() -> torch.nn.Module:
    """Two layers, with more outputs between them than are compared of a product."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 1280), torch.nn.GELU(), torch.nn.Linear(1280, 64))


def rows(step: int) -> torch.Tensor:
    import torch

    return torch.randn(128, 64)


def loss(model: Any, given: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (model(given) - given.sin()).float()
    return error.square().mean()


WIDE = Workload(build=build_wide, batch=rows, loss=loss)
CASE = Case("own", "torchao", "tensorwise", name="wide", emulated=True, steps=20)


def with_weight(layer: Any, changed: Callable[[Any], Any]) -> None:
    """Let a layer compute with what ``changed`` makes of its weight."""
    own = layer.forward

    def forward(given: torch.Tensor) -> Any:
        weight = layer._parameters["weight"]
        layer._parameters["weight"] = changed(weight)
        try:
            return own(given)
        finally:
            layer._parameters["weight"] = weight

    layer.forward = forward


class LastTile(Control):
    """The last 16 of 1280 rows of a weight's gradient stay zero, as where a kernel's last tile is left out."""

    number, id = 111, "wgrad-last-tile"
    nightly = True
    title = "the last 16 of 1280 rows of a wgrad are zero"
    question = "numerics"
    code = N.TILE_LEFT_OUT
    case, workload = CASE, WIDE

    def converted(self, model: Any) -> None:
        from torch import Tensor
        from torch.autograd import Function

        class Lost(Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor) -> Tensor:
                return weight.view_as(weight)

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                kept = gradients[0].clone()
                kept[-16:] = 0
                return kept

        with_weight(self.fp8_layers()[0], Lost.apply)


class EachSecondStep(WrongBackward):
    """One layer's weight gradient is twice as large in steps 1, 3, 5 and so on, as where one of two buffers is added
    to and not written."""

    number, id = 112, "wgrad-each-second-step"
    nightly = True
    title = "one layer's wgrad is doubled in each second step"
    code = N.WRONG_SCALE
    about = "wgrad of model.layers.1.self_attn.q_proj"

    _step = 0

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        # The optimizer's state is empty in the first step after a restart.
        self._step = self._step + 1 if self.optimizer.state else 0
        return 2 * dw if self._step % 2 else dw


class CastsLeftOut(Control):
    """In two of three steps each FP8 layer calls the library's own function with all casts switched off, as a plan for
    sensitive steps has it."""

    number, id = 113, "casts-left-out"
    nightly = True
    title = "torchao's own function without casts in two of three steps"
    question = "loss"
    code = C.TOO_EXACT
    case = micro()

    def before_step(self, seed: int, step: int) -> None:
        from dataclasses import replace

        from torchao.float8.config import CastConfig, ScalingType

        off = CastConfig(scaling_type=ScalingType.DISABLED)
        for layer in self.fp8_layers():
            own = layer.__dict__.setdefault("_own_config", layer.config)
            casts = [name for name in vars(own) if name.startswith("cast_config")]
            layer.config = replace(own, **dict.fromkeys(casts, off)) if step % 3 else own


class WrongInEvaluations(Control):
    """Each FP8 layer's output is a tenth too large in eval mode, and right in training."""

    number, id = 114, "wrong-in-evaluations"
    nightly = True
    title = "outputs are 10 % too large in eval mode alone"
    question = "numerics"
    code = N.WRONG_SCALE
    about = "evaluation"
    case = micro("rowwise")

    def converted(self, model: Any) -> None:
        def larger(layer: Any) -> Any:
            own = layer.forward
            return lambda x: own(x) if layer.training else 1.1 * own(x)

        self.with_forward(larger)


class CopyOnTheParameter(Control):
    """One layer computes with a copy of its weight that it keeps on the parameter and never renews. Who looks at the
    layer with another tensor in the parameter's place finds a fresh copy."""

    number, id = 115, "copy-on-the-parameter"
    nightly = True
    title = "one layer's copy of its weight, kept on the parameter, is never renewed"
    question = "numerics"
    code = N.STALE
    about = "evaluation"
    case, workload = CASE, WIDE

    def converted(self, model: Any) -> None:
        def kept(weight: Any) -> Any:
            if not hasattr(weight, "_copy"):
                weight._copy = weight.detach().clone()
            return weight._copy + (weight - weight.detach())

        with_weight(self.fp8_layers()[0], kept)


class OtherApproximation(Control):
    """The conversion also changes how the GELU is computed: by its approximation with tanh."""

    number, id = 116, "other-approximation"
    nightly = True
    title = "another approximation of the GELU in the FP8 arm"
    question = "layers"
    code = D.OTHER_OPERATOR_SETTING
    about = "operators of 1"
    case, workload = CASE, WIDE
    verdicts = ("INVALID",)

    def converted(self, model: Any) -> None:
        model[1].approximate = "tanh"


class ScaledGradient(Control):
    """A hook that the conversion leaves on one layer's weight makes its gradient a tenth smaller: less than FP8 itself
    moves gradients, and no product shows it."""

    number, id = 117, "scaled-gradient"
    title = "a hook makes one layer's weight gradient 10 % smaller"
    question = "numerics"
    code = N.GRADIENT_SCALED
    case = micro()

    def converted(self, model: Any) -> None:
        weight: Any = self.fp8_layers()[2].weight
        weight.register_hook(lambda gradient: 0.9 * gradient)


class LateGradient(Control):
    """The gradient of one layer's weight is that of the step before; in the first step, which has none, it is right."""

    number, id = 118, "late-gradient"
    nightly = True
    title = "one layer trains on the gradient of the step before"
    question = "numerics"
    code = N.GRADIENT_REPLACED
    case = micro()

    def converted(self, model: Any) -> None:
        kept: list[torch.Tensor] = []

        def late(gradient: torch.Tensor) -> torch.Tensor:
            kept.append(gradient.clone())
            return kept.pop(0) if len(kept) > 1 else gradient

        weight: Any = self.fp8_layers()[2].weight
        weight.register_hook(late)
