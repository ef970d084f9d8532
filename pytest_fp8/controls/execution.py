"""Breakages of what executes: converted layers that multiply BF16, in part or at times, or with a wrong scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from pytest_fp8.backends.base import Conversion
from pytest_fp8.controls.conversion import torchao_config
from pytest_fp8.worker.fault_points import FaultPoints

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine
    from pytest_fp8.worker.recompute import Recompute

Forward = Callable[[torch.Tensor], torch.Tensor]


def fp8_layers(engine: Engine) -> list[Any]:
    return [module for module in engine.model.modules() if engine.backend.is_fp8_layer(module)]


def with_forward(engine: Engine, meant: Conversion, forward_of: Callable[[Any], Forward]) -> Conversion:
    """Give each FP8 layer the forward made for it, after the conversion that was ``meant``, which is handed on."""
    for layer in fp8_layers(engine):
        layer.forward = forward_of(layer)
    return meant


class ForwardOnly(FaultPoints):
    """The forward product is the library's own; the backward pass multiplies BF16, as in layers for frozen weights."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return with_forward(engine, convert(), _forward_only)


def _forward_only(layer: Any) -> Forward:
    own = layer.forward
    return lambda given: _HighPrecisionBackward.apply(given, layer.weight, own)  # type: ignore[no-untyped-call]


class _HighPrecisionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, own: Any) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return own(given)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (rows @ weight).reshape(given.shape), rows.t() @ given.reshape(-1, given.shape[-1]), None


class WgradInHighPrecision(FaultPoints):
    """The layer says ``rowwise`` and multiplies as ``rowwise_with_gw_hp`` does: the weight gradient in BF16."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        meant, config = convert(), torchao_config(engine, "rowwise_with_gw_hp")
        return with_forward(engine, meant, lambda layer: _with_config(layer, config))


def _with_config(layer: Any, config: Any) -> Forward:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return lambda given: matmul_with_hp_or_float8_args.apply(given, layer.weight.t(), layer.linear_mm_config, config)


class RecomputeInBf16(FaultPoints):
    """Activation checkpointing recomputes outside the precision context: the forward pass ran in FP8, its repetition
    in BF16."""

    def checkpointing(self, engine: Engine, recompute: Recompute | None) -> tuple[Recompute | None, Mapping[str, Any]]:
        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _bypassed(fp8_layers(engine))

        return recompute, {"context_fn": contexts}


class RecomputeOutsideAutocast(FaultPoints):
    """torch's reentrant checkpointing around Transformer Engine's layers: the backward pass calls them again after
    ``te.autocast`` has been left, and they multiply in BF16 without a word."""

    def checkpointing(self, engine: Engine, recompute: Recompute | None) -> tuple[Recompute | None, Mapping[str, Any]]:
        return None, {"use_reentrant": True}


@contextmanager
def _bypassed(layers: list[Any]) -> Iterator[None]:
    for layer in layers:
        layer.forward = _plain(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _plain(layer: Any) -> Forward:
    return lambda given: _PlainProduct.apply(given, layer.weight.t())  # type: ignore[no-untyped-call]


class _PlainProduct(torch.autograd.Function):
    """Saves what the FP8 layer saves, so that torch's comparison of the two forward passes finds nothing amiss."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return (given.reshape(-1, given.shape[-1]) @ weight).reshape(*given.shape[:-1], -1)


class EvalSwitchesOff(FaultPoints):
    """FP8 in train mode alone, as Accelerate's wrapper does by default; an evaluation leaves the model in eval mode and
    training goes on."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return with_forward(engine, convert(), _while_training)

    def warm(self, engine: Engine) -> None:
        engine.model.eval()


def _while_training(layer: Any) -> Forward:
    own = layer.forward
    return lambda given: own(given) if layer.training else F.linear(given, layer.weight, layer.bias)


class Fp8Off(FaultPoints):
    """The layers are FP8 layers by name and multiply BF16."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        return with_forward(engine, convert(), _linear)


def _linear(layer: Any) -> Forward:
    return lambda given: F.linear(given, layer.weight, layer.bias)


class OneScaleOffByTwo(FaultPoints):
    """One layer's weight is divided by half the scale it was multiplied with: fprop and dgrad are twice as large."""

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        meant = convert()
        layer = fp8_layers(engine)[len(meant.converted) // 2]
        layer.__class__ = _with_doubled_weight(type(layer))
        return meant


def _with_doubled_weight(layer_type: type) -> type:
    # Doubling is exact in FP8's powers of two; wgrad does not see the weight, hence the detached half.
    doubled = property(lambda self: self._parameters["weight"] + self._parameters["weight"].detach())
    names = {"weight": doubled, "__module__": layer_type.__module__, "__qualname__": layer_type.__qualname__}
    return type(layer_type.__name__, (layer_type,), names)


class AmaxHistoryFrozen(FaultPoints):
    """Transformer Engine's delayed scaling, whose histories and scales are not updated after the first steps."""

    def warm(self, engine: Engine) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        name = "reduce_and_update_fp8_tensors"
        if not hasattr(FP8GlobalStateManager, name):
            raise RuntimeError(f"this Transformer Engine has no FP8GlobalStateManager.{name} to break")
        setattr(FP8GlobalStateManager, name, classmethod(lambda cls, *args, **kwargs: None))
