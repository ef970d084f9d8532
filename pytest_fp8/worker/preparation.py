"""What an arm does to its process and model before training: attention, compiling, activation checkpointing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from pytest_fp8.worker.recompute import NothingRecomputes, Recompute, recompute_with


def prefer_fast_attention(device: torch.device) -> ExitStack:
    """Ask for cuDNN's attention first, then flash, for the life of the arm; held open by the value returned.

    Left to torch, a process that has loaded Transformer Engine takes another kernel than one that has not, and the
    comparison measures attention instead of FP8. The kernels that ran are read from the profile all the same.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    stack = ExitStack()
    if device.type == "cuda":
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        stack.enter_context(sdpa_kernel(order, set_priority=True))
    return stack


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the model's longest ModuleList: a decoder's layers. Empty where there is none."""
    lists = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def compile_blocks(model: torch.nn.Module) -> None:
    """``torch.compile`` each repeated block in place: as fast as the whole model here, warm in a third of the time.

    A model with no repeated blocks is compiled whole. Reaching dynamo's recompilation limit is an error, since
    dynamo would go on eagerly in silence.
    """
    config = torch._dynamo.config
    config.recompile_limit = 64
    if hasattr(config, "fail_on_recompile_limit_hit"):
        config.fail_on_recompile_limit_hit = True
    for block in repeated_blocks(model) or [model]:
        block.compile()


def checkpoint_activations(model: torch.nn.Module, recompute: Recompute | None, more: Mapping[str, Any]) -> None:
    """Recompute each block's activations in the backward pass. Raises where the model offers no way to.

    ``recompute``: the library's own function in place of torch's non-reentrant one. ``more``: further arguments of it.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise NothingRecomputes(f"{type(model).__name__} has no gradient_checkpointing_enable()")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
    if recompute is not None:
        recompute_with(model, functools.partial(recompute, **more))


def accelerate_precision() -> str:
    """The mixed precision that Accelerate trains in, where this process uses it; else an empty string."""
    state = sys.modules.get("accelerate.state")
    return str(state.AcceleratorState._shared_state.get("_mixed_precision", "")) if state is not None else ""


def forget_accelerate() -> None:
    """Take back what Accelerate keeps for a whole process: its first Accelerator decides the precision of all later
    ones. A process that becomes one arm after another needs each to decide anew."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def multiply_bfloat16_through_float32(device: torch.device) -> None:
    """On a CPU without BF16 instructions, compute ``mm`` of BF16 in float32 and round once, from here on in this
    process; attention's backward pass likewise. torch's own path there takes 20 times as long in one of the three
    layouts: 171 ms for 512 x 768 x 256 on a processor that ends at AVX2; attention over 128 tokens goes from 9.2 to 3.6
    ms. The result is that of BF16 operands with a float32 accumulator, as on a GPU.
    """
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        _products_through_float32()


@functools.cache
def _products_through_float32() -> torch.library.Library:
    """Once in a process, which may become one arm after another: torch 2.11 takes no second kernel for an operator."""

    def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # addmm, for mm itself would come back here.
        nothing = torch.zeros(1, dtype=torch.float32 if left.dtype == torch.bfloat16 else left.dtype)
        return torch.addmm(nothing, left.to(nothing.dtype), right.to(nothing.dtype), beta=0).to(left.dtype)

    # As it is before another is put in its place.
    backward = torch.library.get_kernel(f"aten::{ATTENTION_BACKWARD}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def attention_backward(gradient: torch.Tensor, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        def widened(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value

        wide = {name: widened(value) for name, value in options.items()}
        found = backward.call_boxed(keys, widened(gradient), *map(widened, rest), **wide)
        return tuple(value.to(gradient.dtype) for value in found)

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl(ATTENTION_BACKWARD, attention_backward, "CPU")
    return library
