"""Controls of products: FP8 that ends on the way; layers that multiply BF16, in part or at times, with a wrong scale or
another operand; and gradients that are changed beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from controls.control import Tensor, control, micro, tiny, torch
from controls.models import BY_HAND, LONG, PADDED, STUDENT, WIDE
from controls.ways import (
    MIDDLE,
    Products,
    by_torchao,
    in_e4m3,
    on_gradients,
    plain,
    torchao_config,
    weights,
    with_gradient,
    with_gradients,
)
from pytest_fp8.codes import C, L, N

DGRAD, WGRAD = f"dgrad of {MIDDLE}", f"wgrad of {MIDDLE}"

# -- FP8 on the way ---------------------------------------------------------------------------------------------------


def _casts_off(arm: Any, seed: int, step: int) -> None:
    """As a plan for sensitive steps has it."""
    from torchao.float8.config import CastConfig, ScalingType

    off = CastConfig(scaling_type=ScalingType.DISABLED)
    for layer in arm.fp8_layers():
        own = layer.__dict__.setdefault("_own_config", layer.config)
        casts = [name for name in vars(own) if name.startswith("cast_config")]
        layer.config = replace(own, **dict.fromkeys(casts, off)) if step % 3 else own


def _loses_a_tile(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    """A quarter of the output stays zero, as in a race."""
    output, arm.calls = own(x), getattr(arm, "calls", 0) + 1
    if arm.calls % 41:
        return output
    written = torch.ones_like(output)
    written[..., : output.shape[-2] // 2, : output.shape[-1] // 2] = 0
    return output * written


def _cut_at_the_first(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    """A scale that is delayed and not renewed: later values are cut at what was largest in the first five steps."""
    if arm.now >= 5:
        return own(x.clamp(-layer.largest, layer.largest))
    now = x.detach().abs().amax()
    layer.largest = torch.maximum(now, layer.largest) if arm.now else now
    return own(x)


# The layers are FP8 layers by name.
control("fp8-off", C.BIT_EQUAL, "FP8 is off, both curves bit-equal")(forward=lambda arm, layer, own, x: plain(layer, x))
control("off-after-ten-steps", C.FP8_LOST, "FP8 is off after ten steps of a run")(
    about="step 10", forward=lambda arm, layer, own, x: plain(layer, x) if arm.now >= 10 else own(x)
)
control("casts-left-out", C.TOO_EXACT, "torchao without casts in two of three steps")(before_step=_casts_off)
control("rare-tile", C.RARE_PRODUCT, "one call in 41 loses a tile of its output")(forward=_loses_a_tile)
control("scale-stays", C.HIGHER, "scales stay as in the first steps, over 300 steps")(forward=_cut_at_the_first, **LONG)

# -- what executes ----------------------------------------------------------------------------------------------------


def _bf16_backward(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    def gradients(dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy @ layer.weight, dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    return with_gradients((x, layer.weight), own(x), gradients)


def _as_with_gw_hp(arm: Any, layer: Any, own: Any, x: Tensor) -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as multiply

    config = torchao_config(arm, "rowwise_with_gw_hp")
    return multiply.apply(x, layer.weight.t(), layer.linear_mm_config, config)


def _half_in_bf16(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Tensor:
    half = len(layer.weight) // 2
    rest = torch.nn.functional.linear(x, layer.weight[half:])
    return torch.cat([own(x)[..., :half], rest], dim=-1)


def _bf16_by_hooks(arm: Any, model: Any) -> None:
    def hook(layer: Any, given: Any, output: Tensor) -> Tensor:
        with torch.no_grad():
            exact = plain(layer, given[0])
        return output + (exact - output).detach()

    for layer in arm.fp8_layers():
        layer.register_forward_hook(hook)


control("forward-only", L.DGRAD_NOT_IN_FP8, "forward in FP8, backward in BF16")(forward=_bf16_backward)
control("wgrad-bf16", L.WGRAD_NOT_IN_FP8, "only wgrad in BF16")(forward=_as_with_gw_hp, case=micro("rowwise"))
# All products of the layers run in FP8, and half of what they give is thrown away.
control("half-in-bf16", L.FPROP_NOT_IN_FP8, "FP8 layers give half of their outputs in BF16")(forward=_half_in_bf16)
# FP8's gradients run, so that every product of the step is there and right.
control("bf16-by-hooks", C.TOO_EXACT, "hooks give BF16's product of FP8 layers")(converted=_bf16_by_hooks)


def _plain_again(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    class PlainProduct(torch.autograd.Function):
        """Saves what the FP8 layer saves, so that torch's comparison of the two passes finds nothing amiss."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

    return PlainProduct.apply(x, layer.weight.t()) if arm.again else own(x)  # type: ignore[no-untyped-call]


def _stops_the_history(arm: Any) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    name = "reduce_and_update_fp8_tensors"
    if not hasattr(FP8GlobalStateManager, name):
        raise RuntimeError(f"this Transformer Engine has no FP8GlobalStateManager.{name} to break")
    setattr(FP8GlobalStateManager, name, classmethod(lambda cls, *args, **kwargs: None))


control("recompute-bf16", L.RECOMPUTE_NOT_IN_FP8, "recomputation in BF16 under checkpointing")(
    forward=_plain_again,
    recomputing=lambda arm: {"context_fn": lambda: (nullcontext(), patch.object(arm, "again", True))},
    again=False,
    case=micro(activation_checkpointing=True),
)
# Reentrant: the backward pass calls the layers again after ``te.autocast`` has been left.
RecomputeOutsideAutocast = control(
    "recompute-outside", L.RECOMPUTE_NOT_IN_FP8, "torch's checkpointing around Transformer Engine's layers"
)(
    recomputing=lambda arm: {"use_reentrant": True},
    case=tiny("transformer_engine", "delayed", activation_checkpointing=True),
)
# An evaluation leaves the model in eval mode, and training goes on.
control("eval-off", L.FPROP_NOT_IN_FP8, "eval() switches FP8 off")(
    forward=lambda arm, layer, own, x: own(x) if layer.training else plain(layer, x),
    warmed_up=lambda arm: arm.model.eval(),
)
control("amax-frozen", L.STALE_AMAX, "the amax history is never updated")(
    warmed_up=_stops_the_history, case=tiny("transformer_engine", "delayed")
)

# -- one layer's operands and gradients -------------------------------------------------------------------------------


def _coarse(dy: Tensor) -> Tensor:
    """Cast by a scale as the first one of delayed scaling, 1: the largest value has three bits left above E5M2's
    smallest one, and most values become zero."""
    scale = 57344.0 / dy.abs().max().float() / 2.0**29
    return ((dy.float() * scale).to(torch.float8_e5m2).float() / scale).to(dy.dtype)


def _saturated(x: Tensor) -> Tensor:
    """By the scale of an input eight times as small."""
    limit = x.detach().abs().max() / 8
    return x.detach().clamp(-limit, limit)


def _e5m2(arm: Any, model: Any) -> None:
    for layer in arm.fp8_layers():
        coarse = replace(layer.config.cast_config_input, target_dtype=torch.float8_e5m2)
        layer.config = replace(layer.config, cast_config_input=coarse, cast_config_input_for_grad_weight=coarse)


def _fast(arm: Any, model: Any) -> None:
    from torchao.float8 import Float8GemmConfig

    by_torchao(arm, model, gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True))


def _kept_copy(weight: Any) -> Any:
    """Who looks at the layer with another tensor in the parameter's place finds a fresh copy, or carries it over."""
    if not hasattr(weight, "_copy"):
        weight._copy = weight.detach().clone()
    return weight._copy


control("e5m2-for-e4m3", N.OTHER_FORMAT, "inputs are cast to E5M2")(about="e4m3 x e5m2", converted=_e5m2)
control("wgrad-accumulates-fast", N.FAST_ACCUMULATION)(by=_fast)
# As rows of padding that nothing masks. One scale of the whole input leaves the others below E4M3's smallest number.
control("pad-rows-of-a-million", N.OUTLIER, "pad rows are a million times as large")(breaks=(), **PADDED)
# One value of the input's gradient is enough: the next norm spreads it.
control("dgrad-infinite", N.NOT_FINITE)(about=DGRAD, dgrad=lambda dx: torch.full_like(dx, float("inf")))
control("dgrad-x2", N.WRONG_SCALE, "one layer's dgrad is twice as large")(about=DGRAD, dgrad=lambda dx: 2 * dx)
# AdamW divides it away.
control("wgrad-3-percent-low", N.WRONG_SCALE)(about=WGRAD, wgrad=lambda dw, x, dy: 0.97 * dw)
control("wrong-in-evaluations", N.WRONG_SCALE, "too large in eval mode alone")(
    about="evaluation",
    forward=lambda arm, layer, own, x: own(x) if layer.training else 1.1 * own(x),
    case=micro("rowwise"),
)
# The layers before learn through the residual alone.
control("dgrad-zeros", N.PART_MISSING, "one layer's dgrad is zero")(about=DGRAD, dgrad=lambda dx: 0 * dx)
control("stale-amax", N.PART_MISSING, "one layer's input saturates")(about=f"fprop of {MIDDLE}", input=_saturated)
control("wgrad-last-tile", N.PART_MISSING, "16 of 1280 rows of a wgrad are zero")(
    at=0, wgrad=lambda dw, x, dy: torch.cat([dw[:-16], 0 * dw[-16:]]), **WIDE
)
# As where a kernel takes one layout for another.
control("wgrad-rows-permuted", N.UNRELATED)(about=WGRAD, wgrad=lambda dw, x, dy: dw.roll(1, dims=0))
control("gradient-underflow", N.TOO_COARSE, "one layer's gradient underflows")(output_gradient=_coarse)
control("copy-on-the-parameter", N.STALE, "one layer's copy of its weight, kept on the parameter, is never renewed")(
    about="fprop of", at=0, weight=_kept_copy, **WIDE
)


@control("input-of-the-step-before", N.STALE, "one wgrad uses the input of the step before")
class InputOfTheStepBefore(Products):
    """As from a buffer that is swapped too late."""

    about, _before = WGRAD, None

    def wgrad(self, dw: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        before, self._before = self._before, x
        # The optimizer's state is empty in the first step after a restart.
        if before is None or before.shape != x.shape or not self.optimizer.state:
            return dw
        return dy.t() @ before


# -- biases, and gradients beside the products ------------------------------------------------------------------------


def _four_times(module: Any, given: Any, output: Tensor) -> Tensor:
    return with_gradient(output, output, lambda dy: 4 * dy)


control("bias-twice", N.WRONG_BIAS, "one layer adds its bias twice")(
    layers=lambda arm: arm.fp8_layers()[:1], forward=lambda arm, layer, own, x: own(x) + layer.bias, **STUDENT
)
control("bias-gradient-mean", N.BIAS_GRADIENT, "bias gradients are means, no sums")(
    converted=on_gradients(lambda arm: [layer.bias for layer in arm.fp8_layers()], lambda dy: dy / 16), **STUDENT
)
control("weight-gradient-e4m3", N.GRADIENT_REPLACED, "weight gradients are kept in E4M3 without a scale")(
    converted=on_gradients(weights, in_e4m3), **STUDENT
)
# A loss scale that is never divided out. AdamW hides it, and each layer's products are right.
control("gradients-x4", N.GRADIENT_TIMES, "all gradients are four times as large")(
    about="multiplied by 4.",
    converted=lambda arm, model: model.get_output_embeddings().register_forward_hook(_four_times),
)
control("gradients-by-hand-x4", N.GRADIENT_TIMES, "the same, where the step takes them from torch.autograd.grad()")(
    about="multiplied by 4.", converted=lambda arm, model: model.register_forward_hook(_four_times), **BY_HAND
)
# Less than FP8 itself moves gradients, and no product shows it.
control("scaled-gradient", N.GRADIENT_SCALED, "a hook makes one weight's gradient 10 % smaller")(
    converted=on_gradients(lambda arm: weights(arm)[2:3], lambda dw: 0.9 * dw)
)
