"""What libraries compute past torch's operators and hooks: Transformer Engine's products, and recomputation.

Transformer Engine's ``general_gemm`` calls cuBLASLt without a torch operator. So does ``general_grouped_gemm``, of
GroupedLinear: one product for each expert, which count as one of all their rows. What multiplies the library's grouped
tensors (``general_grouped_gemm_for_grouped_tensor``, cuBLASLt 13.4 and later) is not seen: it keeps how the rows are
split on the GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.worker.record.operators import dtype_name, operand_formats

TE_RANGE = "fp8 te product: "
"""How the name of the range begins that a profile has around each product: it names layout, shapes and precision."""
WATCHED = ("general_gemm", "general_grouped_gemm")
HOMES = ("torch.utils.checkpoint", "transformer_engine.pytorch.distributed")
"""The modules with a checkpointing function; both have a hook of the same name that recomputes."""
_LISTENERS: list[Callable[[str], None]] = []


@contextmanager
def watch_transformer_engine(note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Wrap :data:`WATCHED` in each of the library's modules while the context is open. ``note`` is called with what
    :func:`te_product` reads of each product."""

    listeners = [note] if note is not None else []
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for function in WATCHED if name.startswith("transformer_engine.") else ():
                if callable(getattr(module, function, None)):
                    stack.enter_context(patch.object(module, function, _watched(getattr(module, function))))
        _LISTENERS.extend(listeners)
        try:
            yield
        finally:
            for listener in listeners:
                _LISTENERS.remove(listener)


@cache
def _watched(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """The same object each time: compiled code that met it once is not compiled again for the next watched step."""
    import torch

    def wrapper(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
        lefts, rights = (operand if isinstance(operand, (list, tuple)) else [operand] for operand in (left, right))
        a, b, layout = lefts[0], rights[0], kwargs.get("layout", "TN")
        quantized = [not isinstance(operand, torch.Tensor) or "Float8" in type(operand).__name__ for operand in (a, b)]
        kind = FP8 if all(quantized) else "mixed" if any(quantized) else dtype_name(a)
        split = kwargs.get("use_split_accumulator")
        accumulation = "" if split is None else "split" if split else "fast"
        # Only in NT, where both are rows of the batch, has the left operand rows of all experts: else it is the weight.
        shapes = _text(lefts if layout == "NT" else [a]), _text(rights)
        label = "|".join([layout, *shapes, kind, _format(a), _format(b), accumulation])
        for note in _LISTENERS:
            note(label)
        with torch.profiler.record_function(TE_RANGE + label):
            return multiply(left, right, *args, **kwargs)

    return wrapper


def te_extents(layout: str, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, tuple[int, int]]:
    """Inner and outer extents of ``general_gemm(A, B, layout)``, shapes as row-major tensors flattened to two dims.

    TN is fprop (A the weight [N, K], B the input [M, K]); NN is dgrad (A the weight, B the output's gradient [M, N]);
    NT is wgrad (A the input, B the output's gradient).
    """
    if layout == "TN":
        return a[-1], (a[0], b[0])
    if layout == "NN":
        return a[0], (b[0], a[-1])
    return a[0], (b[-1], a[-1])


def _text(operands: Sequence[Any]) -> str:
    """``<rows>x<columns>`` of operands of the same columns, one below the other."""
    sizes = [operand.size() if callable(getattr(operand, "size", None)) else operand.shape for operand in operands]
    return f"{sum(math.prod(size[:-1]) for size in sizes)}x{sizes[0][-1]}"


def _format(operand: Any) -> str:
    """The name of an operand's FP8 format as the library says it (``DType.kFloat8E4M3``), or an empty string."""
    return str(getattr(operand, "_fp8_dtype", ""))


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("x"))


def te_product(phase: str, label: str, kernel: str) -> Product:
    """The product of a range with this name."""
    layout, left, right, kind, *told = label.removeprefix(TE_RANGE).split("|")
    one, two, accumulation = told or ("", "", "")
    inner, outer = te_extents(layout, _shape(left), _shape(right))
    product = Product(phase, inner, outer, kind, f"te.{layout}", kernel)
    fast = {"fast": True, "split": False}.get(accumulation)
    return replace(product, formats=operand_formats(one, two), fast_accumulation=fast)


@contextmanager
def watch_recomputation(phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Open ``phase`` around what activation checkpointing recomputes, in the thread that does it.

    It wraps the libraries' own hook, the one place that runs whether the layers are compiled or not. With a version
    without this hook, recomputed products stay in the backward phase, where their sizes identify most of them.
    """

    with ExitStack() as stack:
        # A library that this process has not imported recomputes nothing here.
        for module in [sys.modules[name] for name in HOMES if name in sys.modules]:
            # Private: the non-reentrant hooks tell no one else that they recompute.
            hook = getattr(module, "_recomputation_hook", None)
            if hook is not None:
                stack.enter_context(patch.object(module, "_recomputation_hook", _marked(hook, phase)))
        yield


def _marked(hook: Any, phase: Callable[[], AbstractContextManager[Any]]) -> type:
    class Marked(hook):  # type: ignore[misc]
        def __enter__(self) -> Any:
            self.marked = phase()
            self.marked.__enter__()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            result = super().__exit__(*error)
            self.marked.__exit__(None, None, None)
            return result

    return Marked
