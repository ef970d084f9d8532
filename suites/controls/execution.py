"""Controls of what executes: converted layers that multiply BF16, in part or at times, or with a wrong scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from controls.control import ACCELERATE, GITHUB, TORCHAO, Control, Forward, micro, tiny
from controls.conversion import torchao_config
from pytest_fp8.codes import C, L, N

if TYPE_CHECKING:
    import torch

OUTSIDE = "recomputation under activation checkpointing runs outside the precision context"


def plain_linear(layer: Any) -> Forward:
    import torch.nn.functional as F

    return lambda given: F.linear(given, layer.weight, layer.bias)


class ForwardOnly(Control):
    """The forward product is the library's own; the backward pass multiplies BF16, as in layers for frozen weights."""

    number, id = 4, "forward-only"
    title = "forward in FP8, backward in BF16"
    source = f"[Unsloth, load_in_fp8]({GITHUB}/unslothai/unsloth/blob/main/unsloth/kernels/fp8.py)"
    question = "layers"
    code = L.DGRAD_NOT_IN_FP8
    case = micro()

    def converted(self, model: Any) -> None:
        import torch

        class HighPrecisionBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, own: Any) -> torch.Tensor:
                ctx.save_for_backward(given, weight)
                return own(given)  # type: ignore[no-any-return]

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> Any:
                given, weight = ctx.saved_tensors
                rows = gradient.reshape(-1, gradient.shape[-1])
                return (rows @ weight).reshape(given.shape), rows.t() @ given.reshape(-1, given.shape[-1]), None

        def forward_only(layer: Any) -> Forward:
            own = layer.forward
            return lambda given: HighPrecisionBackward.apply(given, layer.weight, own)  # type: ignore[no-untyped-call]

        self.with_forward(forward_only)


class WgradInHighPrecision(Control):
    """The layer says ``rowwise`` and multiplies as ``rowwise_with_gw_hp`` does: the weight gradient in BF16."""

    number, id = 5, "wgrad-bf16"
    title = "only wgrad in BF16"
    source = f"[torchao, rowwise_with_gw_hp]({TORCHAO}/blob/main/torchao/float8/config.py)"
    question = "layers"
    code = L.WGRAD_NOT_IN_FP8
    case = micro("rowwise")

    def converted(self, model: Any) -> None:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as multiply

        config = torchao_config(self, "rowwise_with_gw_hp")

        def by_config(layer: Any) -> Forward:
            return lambda given: multiply.apply(given, layer.weight.t(), layer.linear_mm_config, config)

        self.with_forward(by_config)


class RecomputeInBf16(Control):
    """Activation checkpointing recomputes outside the precision context: the forward pass ran in FP8, its repetition
    in BF16."""

    number, id = 7, "recompute-bf16"
    title = "recomputation in BF16 under checkpointing"
    source = f"[Megatron-LM 7538]({GITHUB}/NVIDIA/Megatron-LM/pull/7538)"
    question = "layers"
    code = L.RECOMPUTE_NOT_IN_FP8
    about = "recomputation under activation checkpointing runs outside the precision context"
    case = micro(activation_checkpointing=True)

    def checkpoint_activations(self) -> None:
        from pytest_fp8.worker.training.preparation import checkpoint_activations

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _in_bf16(self.fp8_layers())

        checkpoint_activations(self.model, None, {"context_fn": contexts})


@contextmanager
def _in_bf16(layers: list[Any]) -> Iterator[None]:
    """While entered, these layers multiply BF16."""
    import torch

    class PlainProduct(torch.autograd.Function):
        """Saves what the FP8 layer saves, so that torch's comparison of the two forward passes finds nothing amiss."""

        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(given, weight)
            return (given.reshape(-1, given.shape[-1]) @ weight).reshape(*given.shape[:-1], -1)

    def plain(layer: Any) -> Forward:
        return lambda given: PlainProduct.apply(given, layer.weight.t())  # type: ignore[no-untyped-call]

    for layer in layers:
        layer.forward = plain(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class EvalSwitchesOff(Control):
    """FP8 in train mode alone, as Accelerate's wrapper does by default. An evaluation leaves the model in eval mode,
    and training goes on."""

    number, id = 9, "eval-off"
    title = "eval() switches FP8 off"
    source = f"[Accelerate, use_autocast_during_eval]({ACCELERATE}/utils/dataclasses.py)"
    question = "layers"
    code = L.FPROP_NOT_IN_FP8
    case = micro()

    def converted(self, model: Any) -> None:
        def while_training(layer: Any) -> Forward:
            own, plain = layer.forward, plain_linear(layer)
            return lambda given: own(given) if layer.training else plain(given)

        self.with_forward(while_training)

    def warm_up(self, *given: Any) -> None:
        super().warm_up(*given)
        self.model.eval()


class OneScaleOffByTwo(Control):
    """One layer's weight is divided by half the scale it was multiplied with: fprop and dgrad are twice as large."""

    number, id = 12, "scale-off-by-two"
    nightly = True
    title = "one layer's scale is off by two"
    question = "numerics"
    code = N.WRONG_SCALE
    case = micro()

    def converted(self, model: Any) -> None:
        layers = self.fp8_layers()
        layer = layers[len(layers) // 2]
        layer.__class__ = _with_doubled_weight(type(layer))


def _with_doubled_weight(layer_type: type) -> type:
    # Doubling is exact in FP8's powers of two; wgrad does not see the weight, hence the detached half.
    doubled = property(lambda self: self._parameters["weight"] + self._parameters["weight"].detach())
    names = {"weight": doubled, "__module__": layer_type.__module__, "__qualname__": layer_type.__qualname__}
    return type(layer_type.__name__, (layer_type,), names)


class AmaxHistoryFrozen(Control):
    """Transformer Engine's delayed scaling, whose update of histories and scales does nothing after the first steps."""

    number, id = 13, "amax-frozen"
    title = "the amax history is never updated"
    question = "layers"
    code = L.STALE_AMAX
    case = tiny("transformer_engine", "delayed")

    def warm_up(self, *given: Any) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        super().warm_up(*given)
        name = "reduce_and_update_fp8_tensors"
        if not hasattr(FP8GlobalStateManager, name):
            raise RuntimeError(f"this Transformer Engine has no FP8GlobalStateManager.{name} to break")
        setattr(FP8GlobalStateManager, name, classmethod(lambda cls, *args, **kwargs: None))


class Fp8Off(Control):
    """The layers are FP8 layers by name and multiply BF16."""

    number, id = 15, "fp8-off"
    title = "FP8 is off, both curves bit-equal"
    question = "loss"
    code = C.BIT_EQUAL
    case = micro()

    def converted(self, model: Any) -> None:
        self.with_forward(plain_linear)


class RecomputeOutsideAutocast(Control):
    """torch's reentrant checkpointing in place of ``te.checkpoint``: the backward pass calls Transformer Engine's
    layers again after ``te.autocast`` has been left, and they multiply in BF16 without a word."""

    number, id = 34, "recompute-outside"
    title = "torch's checkpointing around Transformer Engine's layers"
    source = f"[torch.utils.checkpoint under te.autocast]({GITHUB}/pytorch/pytorch/blob/main/torch/utils/checkpoint.py)"
    question = "layers"
    code = L.RECOMPUTE_NOT_IN_FP8
    about = "recomputation under activation checkpointing runs outside the precision context"
    case = tiny("transformer_engine", "delayed", activation_checkpointing=True)

    def checkpoint_activations(self) -> None:
        from pytest_fp8.worker.training.preparation import checkpoint_activations

        checkpoint_activations(self.model, None, {"use_reentrant": True})
