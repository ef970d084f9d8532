"""Controls of what products compute: one layer's gradients changed, or its operands, while all of it stays FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controls.control import Control, micro
from pytest_fp8.codes import N

if TYPE_CHECKING:
    import torch


class WrongBackward(Control):
    """One layer in the middle of the model; the library's own products run, and what comes in or out is changed."""

    question = "numerics"
    case = micro()

    def input(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies in place of its input."""
        return x

    def output_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies in place of its output's gradient."""
        return dy

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        """What the layer before gets in place of the input's gradient."""
        return dx

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """What the weight gets in place of its gradient, which is dy^T . x."""
        return dw

    def converted(self, model: Any) -> None:
        self._given: list[torch.Tensor] = []
        self._dy: list[torch.Tensor] = []
        layers = self.fp8_layers()
        layer = layers[len(layers) // 2]
        layer.forward = self._forward(layer)

    def _forward(self, layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        own = layer.forward

        def weight_gradient(dw: torch.Tensor) -> torch.Tensor:
            x, dy = self._given.pop(), self._dy.pop()
            return self.wgrad(dw, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

        def output_gradient(dy: torch.Tensor) -> torch.Tensor:
            self._dy[:] = [dy]
            return self.output_gradient(dy)

        def forward(x: torch.Tensor) -> torch.Tensor:
            self._given[:] = [x.detach()]
            weight = layer._parameters["weight"]
            layer._parameters["weight"] = _with_gradient(weight, weight, weight_gradient)
            try:
                product = own(_with_gradient(x, self.input(x), self.dgrad))
            finally:
                layer._parameters["weight"] = weight
            return _with_gradient(product, product, output_gradient)

        return forward


def _with_gradient(source: torch.Tensor, value: torch.Tensor, change: Any) -> torch.Tensor:
    """``value``, whose gradient goes to ``source`` after ``change``."""
    import torch

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.detach().view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return change(gradient), None

    return Changed.apply(source, value.detach())  # type: ignore[no-untyped-call, no-any-return]


class DgradTwice(WrongBackward):
    """The scale of the output's gradient is off by two where it is divided out: dgrad is twice as large."""

    number, id = 50, "dgrad-x2"
    title = "one layer's dgrad is twice as large"
    code = N.WRONG_SCALE
    about = "dgrad of model.layers.1.self_attn.q_proj"

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        return 2 * dx


class WgradThreePercentLow(WrongBackward):
    """3 % of the weight gradient are missing, evenly: AdamW divides it away."""

    number, id = 51, "wgrad-three-percent-low"
    nightly = True
    title = "one layer's wgrad is 3 % too small"
    code = N.WRONG_SCALE
    about = "wgrad of model.layers.1.self_attn.q_proj"

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return 0.97 * dw


class GradientsTimesFour(Control):
    """A loss scale that is never divided out: all gradients are four times as large. AdamW hides it. Each layer's
    products are right."""

    number, id = 52, "gradients-x4"
    title = "all gradients are four times as large"
    question = "numerics"
    code = N.GRADIENT_TIMES
    about = "multiplied by 4."
    case = micro()

    def converted(self, model: Any) -> None:
        model.get_output_embeddings().register_forward_hook(
            lambda *call: _with_gradient(call[2], call[2], lambda dy: 4 * dy)
        )


class DgradZeros(WrongBackward):
    """The gradient stops at one layer: those before it learn through the residual alone."""

    number, id = 53, "dgrad-zeros"
    title = "one layer's dgrad is zero"
    code = N.GIVES_ZEROS
    about = "dgrad of model.layers.1.self_attn.q_proj"

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        return 0 * dx


class WgradNoise(WrongBackward):
    """Noise as large as the weight gradient itself in place of it, as from memory that was never written."""

    number, id = 54, "wgrad-noise"
    title = "one layer's wgrad is noise"
    code = N.UNRELATED
    about = "wgrad of model.layers.1.self_attn.q_proj"

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        import torch

        noise = torch.randn(dw.shape, generator=torch.Generator().manual_seed(1)).to(dw)
        return noise * dw.float().std()


class HalfTheTokens(WrongBackward):
    """The weight gradient sums over the first half of the tokens."""

    number, id = 55, "wgrad-half-the-tokens"
    title = "one layer's wgrad loses half of the tokens"
    code = N.PART_MISSING
    about = "wgrad of model.layers.1.self_attn.q_proj"

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        half = len(x) // 2
        return dy[:half].t() @ x[:half]


class GradientUnderflow(WrongBackward):
    """The output's gradient is cast with a scale that is too small, as by the first scales of delayed scaling, which
    are 1: its largest value has three bits left above E5M2's smallest one, and most values become zero."""

    number, id = 56, "gradient-underflow"
    title = "one layer's gradient underflows"
    code = N.TOO_COARSE
    about = "operands are coarser than the recipe's"

    def output_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        import torch

        scale = 57344.0 / dy.abs().max().float() / 2.0**29
        return ((dy.float() * scale).to(torch.float8_e5m2).float() / scale).to(dy.dtype)


class StaleAmax(WrongBackward):
    """The input is cast with the scale of an input eight times as small: its large values saturate."""

    number, id = 57, "stale-amax"
    nightly = True
    title = "one layer's input saturates"
    code = N.PART_MISSING
    about = "fprop of model.layers.1.self_attn.q_proj"

    def input(self, x: torch.Tensor) -> torch.Tensor:
        limit = x.detach().abs().max() / 8
        return x.detach().clamp(-limit, limit)


class E5m2ForE4m3(Control):
    """All layers cast their inputs to E5M2, as for gradients, in place of E4M3."""

    number, id = 58, "e5m2-for-e4m3"
    title = "inputs are cast to E5M2"
    question = "numerics"
    code = N.OTHER_FORMAT
    about = "e4m3 x e5m2"
    case = micro()

    def converted(self, model: Any) -> None:
        from dataclasses import replace

        import torch

        for layer in self.fp8_layers():
            coarse = replace(layer.config.cast_config_input, target_dtype=torch.float8_e5m2)
            layer.config = replace(layer.config, cast_config_input=coarse, cast_config_input_for_grad_weight=coarse)


class WgradRowsPermuted(WrongBackward):
    """The weight gradient's rows are another order's, as where a kernel takes one layout for another."""

    number, id = 59, "wgrad-rows-permuted"
    nightly = True
    title = "one layer's wgrad has its rows in another order"
    code = N.UNRELATED
    about = "wgrad of model.layers.1.self_attn.q_proj"

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return dw.roll(1, dims=0)


class DgradOfAnotherLayer(WrongBackward):
    """The input's gradient is that of another batch row, as from a buffer that was used again too early."""

    number, id = 60, "dgrad-of-another"
    nightly = True
    title = "one layer's dgrad is another product's"
    code = N.UNRELATED
    about = "dgrad of model.layers.1.self_attn.q_proj"

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        return dx.roll(1, dims=0)


class OneInAHundred(WrongBackward):
    """One value in a hundred of the weight gradient is lost."""

    number, id = 61, "wgrad-one-in-a-hundred"
    nightly = True
    title = "one in a hundred values of a wgrad is wrong"
    code = N.TOO_COARSE
    about = "wgrad of model.layers.1.self_attn.q_proj"

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        import torch

        picked = torch.rand(dw.shape, generator=torch.Generator().manual_seed(1)) < 0.01
        return torch.where(picked.to(dw.device), -3 * dw.abs().mean(), dw)


class ForwardPlusThreePercent(Control):
    """Every layer's output is 3 % too large, in both directions of the pass: within any loss's noise."""

    number, id = 62, "forward-three-percent-high"
    nightly = True
    title = "all outputs are 3 % too large"
    question = "numerics"
    code = N.WRONG_SCALE
    case = micro("rowwise")

    def converted(self, model: Any) -> None:
        def larger(layer: Any) -> Any:
            own = layer.forward
            return lambda x: 1.03 * own(x)

        self.with_forward(larger)


class InputOfTheStepBefore(WrongBackward):
    """From the second step of a training run on, the weight gradient takes the input of the step before, as from a
    buffer that is swapped too late. The first step is right."""

    number, id = 88, "input-of-the-step-before"
    title = "one layer's wgrad uses the input of the step before, from step 2 on"
    code = N.STALE
    about = "wgrad of model.layers.1.self_attn.q_proj"

    _before: torch.Tensor | None = None

    def wgrad(self, dw: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        before, self._before = self._before, x
        # The optimizer's state is empty in the first step after a restart.
        if before is None or before.shape != x.shape or not self.optimizer.state:
            return dw
        return dy.t() @ before


class GradientNotFinite(WrongBackward):
    """One value of the input's gradient is infinite, which the next norm spreads."""

    number, id = 63, "dgrad-infinite"
    title = "one layer's dgrad overflows"
    code = N.NOT_FINITE
    about = "dgrad of model.layers.1.self_attn.q_proj"

    def dgrad(self, dx: torch.Tensor) -> torch.Tensor:
        changed = dx.clone()
        changed[..., :] = float("inf")
        return changed
