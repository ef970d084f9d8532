"""What an arm does to its process and model before training: attention kernels, activation checkpointing, compiling;
products on a CPU without BF16 instructions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from pytest_fp8.worker.training.recompute import NothingRecomputes, Recompute, recompute_with

RECOMPILE_LIMIT = 8
"""dynamo's own."""


def require_device(device: torch.device) -> None:
    """Raises ``RuntimeError`` where this process has no such device."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"this arm must run on a GPU and torch {torch.__version__} sees none "
            f"(built for CUDA {torch.version.cuda}); it will not fall back to the CPU"
        )


def prefer_fast_attention(device: torch.device) -> ExitStack:
    """Ask for cuDNN's attention first, then flash attention, for as long as the returned stack is open.

    By default a process that has loaded Transformer Engine takes another kernel than one that has not, and the
    comparison would measure attention instead of FP8. The kernels that ran are read from the profile all the same.
    Kernels that the user's module switched off stay off.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    stack = ExitStack()
    if device.type == "cuda":
        switches = torch.backends.cuda
        order = {
            SDPBackend.CUDNN_ATTENTION: switches.cudnn_sdp_enabled(),
            SDPBackend.FLASH_ATTENTION: switches.flash_sdp_enabled(),
            SDPBackend.EFFICIENT_ATTENTION: switches.mem_efficient_sdp_enabled(),
            SDPBackend.MATH: switches.math_sdp_enabled(),
        }
        stack.enter_context(sdpa_kernel([kernel for kernel, on in order.items() if on], set_priority=True))
    return stack


@contextmanager
def under_autocast(device: torch.device, inner: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """``torch.autocast`` to bfloat16, with the context ``inner`` inside.

    On a CPU the switch for GPUs is on, too: torchao's layer asks for that one, whatever device it is on.
    """
    of_gpu = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        if device.type == "cpu":
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", torch.bfloat16)
        with torch.autocast(device.type, torch.bfloat16), inner():
            yield
    finally:
        torch.set_autocast_enabled("cuda", of_gpu[0])
        torch.set_autocast_dtype("cuda", of_gpu[1])


def checkpoint_activations(model: torch.nn.Module, recompute: Recompute | None, more: Mapping[str, Any]) -> None:
    """Recompute each block's activations in the backward pass.

    ``recompute``: the library's own function in place of torch's non-reentrant one. ``more``: further arguments of it.
    Raises :class:`NothingRecomputes` where the model has no ``gradient_checkpointing_enable``.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise NothingRecomputes(f"{type(model).__name__} has no gradient_checkpointing_enable()")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
    if recompute is not None:
        recompute_with(model, functools.partial(recompute, **more))


def compile_blocks(model: torch.nn.Module) -> None:
    """``torch.compile`` each repeated block in place, so that parameter names stay as they are: as fast as the whole
    model here, warm in a third of the time.

    A model without repeated blocks is compiled whole. Reaching dynamo's recompilation limit is an error, because dynamo
    would go on uncompiled without a word. A limit that the user set stays, with what dynamo does there.
    """
    # Private: torch.compiler.config has no limit of recompilations.
    config = torch._dynamo.config
    if config.recompile_limit == RECOMPILE_LIMIT:
        config.recompile_limit = 64
        if hasattr(config, "fail_on_recompile_limit_hit"):
            config.fail_on_recompile_limit_hit = True
    for block in repeated_blocks(model) or [model]:
        block.compile()


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of the model's longest ModuleList: a decoder's layers. Empty where there is none."""
    lists = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


# -- BF16 on a CPU without its instructions ---------------------------------------------------------------------------

ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
OPERANDS = {
    "mm": 2,
    "addmm": 3,
    "bmm": 2,
    "baddbmm": 3,
    "convolution": 2,
    "convolution_backward": 3,
    ATTENTION_BACKWARD: 4,
}
"""Operator -> how many of its first arguments are tensors of the type that it computes in."""


def multiply_bfloat16_through_float32(device: torch.device) -> None:
    """On a CPU without BF16 instructions, compute products, convolutions and attention's backward pass of BF16 tensors
    in float32 and round once, from here on in this process.
    The result is that of BF16 operands with a float32 accumulator, as on a GPU. torch's own paths there take up to 25
    times as long: a step of a 3 x 3 convolution of 64 channels 1240 ms in place of 51."""
    # Private: torch.backends.cpu names instruction sets, and no public name says whether BF16 is among them.
    if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        replace_products()


@functools.cache
def replace_products() -> torch.library.Library:
    """Register the float32 kernels. Cached, for a process may become one arm after another and torch 2.11 takes no
    second kernel for an operator."""
    # All of torch's own kernels are read before one is replaced.
    through = {name: _through_float32(name, operands) for name, operands in OPERANDS.items()}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # It would stand at the end of an arm's output, and be taken for the cause of what ended it.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, kernel in through.items():
            library.impl(name, kernel, "CPU")
    return library


def _through_float32(name: str, operands: int) -> Callable[..., Any]:
    own = torch.library.get_kernel(f"aten::{name}", "CPU")
    # Private: a kernel that torch.library.get_kernel() gives takes them, and torch.library has no class for them.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def kernel(*given: Any, **named: Any) -> Any:
        if any(operand.dtype != torch.bfloat16 for operand in given[:operands]):
            return own.call_boxed(keys, *given, **named)
        wide = {key: _widened(value) for key, value in named.items()}
        found = own.call_boxed(keys, *map(_widened, given), **wide)
        return tuple(map(_rounded, found)) if isinstance(found, (tuple, list)) else _rounded(found)

    return kernel


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def _rounded(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, torch.Tensor) else value
