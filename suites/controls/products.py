"""Controls of products: FP8 layers that multiply BF16, in part or at times, with a wrong scale or another operand; and
gradients that are changed beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controls.control import ACCELERATE, GITHUB, TORCHAO, Control, control, fault, micro, tiny
from controls.lazily import torch
from controls.models import BIASED, STUDENT, WIDE, WIDE_CASE
from controls.ways import MIDDLE, Forwards, Products, on_gradients, plain, torchao_config, with_gradient
from pytest_fp8.codes import C, L, N

if TYPE_CHECKING:
    from torch import Tensor

DGRAD, WGRAD = f"dgrad of {MIDDLE}", f"wgrad of {MIDDLE}"

# -- what executes ----------------------------------------------------------------------------------------------------


def _bf16_backward(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
    class HighPrecisionBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
            ctx.save_for_backward(x, weight)
            return own(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            rows = dy.reshape(-1, dy.shape[-1])
            return (rows @ weight).reshape(x.shape), rows.t() @ x.reshape(-1, x.shape[-1])

    return HighPrecisionBackward.apply(x, layer.weight)  # type: ignore[no-untyped-call]


# As in layers for frozen weights.
fault(
    "forward-only",
    "forward in FP8, backward in BF16",
    L.DGRAD_NOT_IN_FP8,
    Forwards,
    source=f"[Unsloth, load_in_fp8]({GITHUB}/unslothai/unsloth/blob/main/unsloth/kernels/fp8.py)",
    forward=_bf16_backward,
)


def _as_with_gw_hp(arm: Any, layer: Any, own: Any, x: Tensor) -> Any:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as multiply

    config = torchao_config(arm, "rowwise_with_gw_hp")
    return multiply.apply(x, layer.weight.t(), layer.linear_mm_config, config)


fault(
    "wgrad-bf16",
    "only wgrad in BF16",
    L.WGRAD_NOT_IN_FP8,
    Forwards,
    source=f"[torchao, rowwise_with_gw_hp]({TORCHAO}/blob/main/torchao/float8/config.py)",
    forward=_as_with_gw_hp,
    case=micro("rowwise"),
)


def _half_in_bf16(arm: Any, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Tensor:
    half = len(layer.weight) // 2
    rest = torch.nn.functional.linear(x, layer.weight[half:])
    return torch.cat([own(x)[..., :half], rest], dim=-1)


# All products of the layers run in FP8, and half of what they give is thrown away.
fault(
    "half-in-bf16",
    "FP8 layers give half of their outputs in BF16",
    L.FPROP_NOT_IN_FP8,
    Forwards,
    forward=_half_in_bf16,
)


def _bf16_by_hooks(arm: Any, model: Any) -> None:
    def hook(layer: Any, given: Any, output: Tensor) -> Tensor:
        with torch.no_grad():
            exact = plain(layer, given[0])
        return output + (exact - output).detach()

    for layer in arm.fp8_layers():
        layer.register_forward_hook(hook)


# FP8's gradients run, so that every product of the step is there and right.
fault(
    "bf16-by-hooks",
    "hooks put BF16's product in the place of each FP8 layer's output",
    C.TOO_EXACT,
    converted=_bf16_by_hooks,
)


@control(
    "recompute-bf16",
    "recomputation in BF16 under checkpointing",
    L.RECOMPUTE_NOT_IN_FP8,
    source=f"[Megatron-LM 7538]({GITHUB}/NVIDIA/Megatron-LM/pull/7538)",
    case=micro(activation_checkpointing=True),
)
class RecomputeInBf16(Forwards):
    recomputing = False

    def checkpoint_activations(self) -> None:
        from pytest_fp8.worker.training.preparation import checkpoint_activations

        checkpoint_activations(self.model, None, {"context_fn": lambda: (nullcontext(), self)})

    def __enter__(self) -> None:
        self.recomputing = True

    def __exit__(self, *_: object) -> None:
        self.recomputing = False

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        class PlainProduct(torch.autograd.Function):
            """Saves what the FP8 layer saves, so that torch's comparison of the two passes finds nothing amiss."""

            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return (x.reshape(-1, x.shape[-1]) @ weight).reshape(*x.shape[:-1], -1)

        if not self.recomputing:
            return own(x)
        return PlainProduct.apply(x, layer.weight.t())  # type: ignore[no-untyped-call]


@control(
    "recompute-outside",
    "torch's checkpointing around Transformer Engine's layers",
    L.RECOMPUTE_NOT_IN_FP8,
    source=f"[torch.utils.checkpoint under te.autocast]({GITHUB}/pytorch/pytorch/blob/main/torch/utils/checkpoint.py)",
    case=tiny("transformer_engine", "delayed", activation_checkpointing=True),
)
class RecomputeOutsideAutocast(Control):
    """Reentrant: the backward pass calls the layers again after ``te.autocast`` has been left."""

    def checkpoint_activations(self) -> None:
        from pytest_fp8.worker.training.preparation import checkpoint_activations

        checkpoint_activations(self.model, None, {"use_reentrant": True})


@control(
    "eval-off",
    "eval() switches FP8 off",
    L.FPROP_NOT_IN_FP8,
    source=f"[Accelerate, use_autocast_during_eval]({ACCELERATE}/utils/dataclasses.py)",
)
class EvalSwitchesOff(Forwards):
    """An evaluation leaves the model in eval mode, and training goes on."""

    def forward(self, layer: Any, own: Callable[[Any], Any], x: Tensor) -> Any:
        return own(x) if layer.training else plain(layer, x)

    def warm_up(self, *given: Any) -> None:
        super().warm_up(*given)
        self.model.eval()


@control("amax-frozen", "the amax history is never updated", L.STALE_AMAX, case=tiny("transformer_engine", "delayed"))
class AmaxHistoryFrozen(Control):
    def warm_up(self, *given: Any) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        super().warm_up(*given)
        name = "reduce_and_update_fp8_tensors"
        if not hasattr(FP8GlobalStateManager, name):
            raise RuntimeError(f"this Transformer Engine has no FP8GlobalStateManager.{name} to break")
        setattr(FP8GlobalStateManager, name, classmethod(lambda cls, *args, **kwargs: None))


# -- one layer's operands and gradients -------------------------------------------------------------------------------

# Doubling is exact in FP8's powers of two. wgrad does not see the weight.
fault(
    "scale-off-by-two",
    "one layer's scale is off by two",
    N.WRONG_SCALE,
    Products,
    weight=lambda _, w: 2 * w,
    nightly=True,
)
fault(
    "dgrad-x2", "one layer's dgrad is twice as large", N.WRONG_SCALE, Products, about=DGRAD, dgrad=lambda _, dx: 2 * dx
)
# AdamW divides it away.
fault(
    "wgrad-three-percent-low",
    "one layer's wgrad is 3 % too small",
    N.WRONG_SCALE,
    Products,
    about=WGRAD,
    wgrad=lambda _, dw, x, dy: 0.97 * dw,
    nightly=True,
)
# The layers before learn through the residual alone.
fault("dgrad-zeros", "one layer's dgrad is zero", N.PART_MISSING, Products, about=DGRAD, dgrad=lambda _, dx: 0 * dx)


def _noise(_: Any, dw: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    noise = torch.randn(dw.shape, generator=torch.Generator().manual_seed(1)).to(dw)
    return noise * dw.float().std()


# As from memory that was never written.
fault("wgrad-noise", "one layer's wgrad is noise", N.UNRELATED, Products, about=WGRAD, wgrad=_noise)
fault(
    "wgrad-half-the-tokens",
    "one layer's wgrad loses half of the tokens",
    N.PART_MISSING,
    Products,
    about=WGRAD,
    # Every second one: of halves of a text one may have the whole gradient.
    wgrad=lambda _, dw, x, dy: dy[::2].t() @ x[::2],
)


def _coarse(_: Any, dy: Tensor) -> Tensor:
    """Cast by a scale as the first one of delayed scaling, 1: the largest value has three bits left above E5M2's
    smallest one, and most values become zero."""
    scale = 57344.0 / dy.abs().max().float() / 2.0**29
    return ((dy.float() * scale).to(torch.float8_e5m2).float() / scale).to(dy.dtype)


fault(
    "gradient-underflow",
    "one layer's gradient underflows",
    N.TOO_COARSE,
    Products,
    output_gradient=_coarse,
)


def _saturated(_: Any, x: Tensor) -> Tensor:
    limit = x.detach().abs().max() / 8
    return x.detach().clamp(-limit, limit)


# By the scale of an input eight times as small.
fault(
    "stale-amax",
    "one layer's input saturates",
    N.PART_MISSING,
    Products,
    about=f"fprop of {MIDDLE}",
    input=_saturated,
    nightly=True,
)


def _e5m2(arm: Any, model: Any) -> None:
    for layer in arm.fp8_layers():
        coarse = replace(layer.config.cast_config_input, target_dtype=torch.float8_e5m2)
        layer.config = replace(layer.config, cast_config_input=coarse, cast_config_input_for_grad_weight=coarse)


fault("e5m2-for-e4m3", "inputs are cast to E5M2", N.OTHER_FORMAT, about="e4m3 x e5m2", converted=_e5m2)
# As where a kernel takes one layout for another.
fault(
    "wgrad-rows-permuted",
    "one layer's wgrad has its rows in another order",
    N.UNRELATED,
    Products,
    about=WGRAD,
    wgrad=lambda _, dw, x, dy: dw.roll(1, dims=0),
    nightly=True,
)
# That of another batch row, as from a buffer that was used again too early.
fault(
    "dgrad-of-another",
    "one layer's dgrad is another product's",
    N.UNRELATED,
    Products,
    about=DGRAD,
    dgrad=lambda _, dx: dx.roll(1, dims=0),
    nightly=True,
)


def _one_in_a_hundred(_: Any, dw: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    picked = torch.rand(dw.shape, generator=torch.Generator().manual_seed(1)) < 0.01
    return torch.where(picked.to(dw.device), -3 * dw.abs().mean(), dw)


fault(
    "wgrad-one-in-a-hundred",
    "one in a hundred values of a wgrad is wrong",
    N.TOO_COARSE,
    Products,
    about=WGRAD,
    wgrad=_one_in_a_hundred,
    nightly=True,
)
# Within any loss's noise.
fault(
    "forward-three-percent-high",
    "all outputs are 3 % too large",
    N.WRONG_SCALE,
    Forwards,
    forward=lambda arm, layer, own, x: 1.03 * own(x),
    case=micro("rowwise"),
    nightly=True,
)
# One value of the input's gradient is enough: the next norm spreads it.
fault(
    "dgrad-infinite",
    "one layer's dgrad overflows",
    N.NOT_FINITE,
    Products,
    about=DGRAD,
    dgrad=lambda _, dx: torch.full_like(dx, float("inf")),
)
# As where a kernel's last tile is left out.
fault(
    "wgrad-last-tile",
    "the last 16 of 1280 rows of a wgrad are zero",
    N.PART_MISSING,
    Products,
    at=0,
    wgrad=lambda _, dw, x, dy: torch.cat([dw[:-16], 0 * dw[-16:]]),
    case=WIDE_CASE,
    workload=WIDE,
    nightly=True,
)


@control(
    "input-of-the-step-before",
    "one layer's wgrad uses the input of the step before, from step 2 on",
    N.STALE,
    about=WGRAD,
)
class InputOfTheStepBefore(Products):
    """As from a buffer that is swapped too late."""

    _before: Tensor | None = None

    def wgrad(self, dw: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        before, self._before = self._before, x
        # The optimizer's state is empty in the first step after a restart.
        if before is None or before.shape != x.shape or not self.optimizer.state:
            return dw
        return dy.t() @ before


@control(
    "wgrad-each-second-step",
    "one layer's wgrad is doubled in each second step",
    N.WRONG_SCALE,
    about=WGRAD,
    nightly=True,
)
class EachSecondStep(Products):
    """As where one of two buffers is added to and not written."""

    _step = 0

    def wgrad(self, dw: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        # The optimizer's state is empty in the first step after a restart.
        self._step = self._step + 1 if self.optimizer.state else 0
        return 2 * dw if self._step % 2 else dw


def _kept_copy(_: Any, weight: Any) -> Any:
    if not hasattr(weight, "_copy"):
        weight._copy = weight.detach().clone()
    return weight._copy


# Who looks at the layer with another tensor in the parameter's place finds a fresh copy.
fault(
    "copy-on-the-parameter",
    "one layer's copy of its weight, kept on the parameter, is never renewed",
    N.STALE,
    Products,
    about="evaluation",
    at=0,
    weight=_kept_copy,
    case=WIDE_CASE,
    workload=WIDE,
    nightly=True,
)
fault(
    "wrong-in-evaluations",
    "outputs are 10 % too large in eval mode alone",
    N.WRONG_SCALE,
    Forwards,
    about="evaluation",
    forward=lambda arm, layer, own, x: own(x) if layer.training else 1.1 * own(x),
    case=micro("rowwise"),
    nightly=True,
)

# -- biases, and gradients beside the products ------------------------------------------------------------------------

fault(
    "bias-twice",
    "one layer adds its bias twice",
    N.WRONG_BIAS,
    Forwards,
    layers=lambda arm: arm.fp8_layers()[:1],
    forward=lambda arm, layer, own, x: own(x) + layer.bias,
    case=BIASED,
    workload=STUDENT,
    nightly=True,
)
fault(
    "bias-gradient-mean",
    "gradients of biases are means and not sums",
    N.BIAS_GRADIENT,
    converted=lambda arm, model: on_gradients([layer.bias for layer in arm.fp8_layers()], lambda dy: dy / 16),
    case=BIASED,
    workload=STUDENT,
)
fault(
    "weight-gradient-e4m3",
    "weight gradients are kept in E4M3 without a scale",
    N.GRADIENT_REPLACED,
    converted=lambda arm, model: on_gradients(
        [layer.weight for layer in arm.fp8_layers()], lambda dw: dw.to(torch.float8_e4m3fn).to(dw.dtype)
    ),
    case=BIASED,
    workload=STUDENT,
    nightly=True,
)
# A loss scale that is never divided out. AdamW hides it, and each layer's products are right.
fault(
    "gradients-x4",
    "all gradients are four times as large",
    N.GRADIENT_TIMES,
    about="multiplied by 4.",
    converted=lambda arm, model: model.get_output_embeddings().register_forward_hook(
        lambda *call: with_gradient(call[2], call[2], lambda dy: 4 * dy)
    ),
)
# Less than FP8 itself moves gradients, and no product shows it.
fault(
    "scaled-gradient",
    "a hook makes one layer's weight gradient 10 % smaller",
    N.GRADIENT_SCALED,
    converted=lambda arm, model: on_gradients([arm.fp8_layers()[2].weight], lambda dw: 0.9 * dw),
)


def _late(arm: Any, model: Any) -> None:
    kept: list[Tensor] = []

    def late(gradient: Tensor) -> Tensor:
        kept.append(gradient.clone())
        return kept.pop(0) if len(kept) > 1 else gradient

    on_gradients([arm.fp8_layers()[2].weight], late)


fault(
    "late-gradient",
    "one layer trains on the gradient of the step before",
    N.GRADIENT_REPLACED,
    converted=_late,
    nightly=True,
)
