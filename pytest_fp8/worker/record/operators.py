"""torch's operators for matrix products: which arguments are the operands, and the products that a call computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pytest_fp8.casts import BLOCK, LINE, MX, SQUARE, TENSOR
from pytest_fp8.questions.layers.products import CONVOLUTION, FP8, RECURRENT, Product

if TYPE_CHECKING:
    import torch

OPERANDS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    # One product per expert; the left operand holds the rows of all. transformers has its own where torch has none.
    "_grouped_mm": (0, 1),
    "transformers::grouped_mm_fallback": (0, 1),
    "_scaled_grouped_mm": (0, 1),
    "_scaled_mm": (0, 1),
    "_scaled_mm_v2": (0, 1),
}
"""Operator -> the positions of its left and right operand. Other operators that are given two matrices of FP8 values
and give one in another type are products as well: a kernel of the user's own, or a library's."""
RECURRENT_OPERATORS = {
    "mkldnn_rnn_layer": 1,
    "mkldnn_rnn_layer_backward": 2,
    "_cudnn_rnn": 1,
    "_cudnn_rnn_backward": 2,
}
"""Operator of a recurrent layer -> products of each weight in one call: the backward pass has two."""
_FLOAT8 = {f"torch.float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}
_HELD = ("_data", "qdata")
"""Where torchao's tensors keep their values."""


def operand_formats(left: str, right: str) -> tuple[str, ...]:
    """``e4m3`` or ``e5m2`` of both operands, from the names of their types; empty where they are not both FP8.

    >>> operand_formats("torch.float8_e4m3fn", "c10::Float8_e5m2")
    ('e4m3', 'e5m2')
    """
    found = [next((known for known in ("e4m3", "e5m2") if known in name.lower()), "") for name in (left, right)]
    return tuple(found) if all(found) else ()


def product_of(
    phase: str, operator: str, left: tuple[int, ...], right: tuple[int, ...], kind: str, kernel: str = ""
) -> Product:
    """The product of operands of these shapes; three dimensions are a batch of products."""
    batch = left[0] if len(left) == 3 else 1
    return Product(phase, left[-1], (left[-2], right[-1]), kind, operator, kernel, batch)


def products_of_call(phase: str, operator: str, args: Any, result: Any) -> list[Product]:
    """The products that one call computes, with the operands' precision; attention's own are not counted."""
    if operator in OPERANDS:
        left, right = (args[index] for index in OPERANDS[operator])
        scales = args[2:4] if operator == "_scaled_mm" else [_scale(left), _scale(right)]
        product = product_of(phase, operator, tuple(left.shape), tuple(right.shape), "")
        product = replace(product, fast_accumulation=_fast_accumulation(left, right))
        return [_with_formats(product, left, right, scales)]
    if operator in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"):
        transposed = operator == "convolution" and args[6]
        return [_convolution(phase, args[0], args[1], result, transposed)]
    if operator == "convolution_backward":
        gradient, given, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return [_convolution(phase, given, weight, gradient, transposed)] * sum(map(bool, wanted[:2]))
    if operator in RECURRENT_OPERATORS:
        return _recurrent(phase, operator, args)
    return _of_another_operator(phase, operator, args, result)


def _with_formats(product: Product, left: Any, right: Any, scales: Sequence[Any] = ()) -> Product:
    """The product's kind: ``fp8`` where both operands hold FP8 values, ``mixed`` where one does, else the left
    operand's dtype; and the formats and scales of FP8 values."""
    dtypes = [_values(operand).dtype for operand in (left, right)]
    fp8 = {str(dtype) in _FLOAT8 for dtype in dtypes}
    kind = FP8 if fp8 == {True} else "mixed" if len(fp8) == 2 else dtype_name(left)
    product = replace(product, kind=kind, formats=operand_formats(*map(str, dtypes)))
    if kind != FP8 or len(scales) != 2 or any(scale is None for scale in scales):
        return product
    granularity = [_granularity(s, size, product.inner) for s, size in zip(scales, product.outer, strict=True)]
    powers = all(bool((scale.float().frexp().mantissa == 0.5).all()) for scale in scales)
    return replace(product, scales=tuple(granularity), powers=powers)


def _scale(operand: Any) -> Any:
    """The scales of one of torchao's tensors; ``None`` of others."""
    return next((getattr(operand, name) for name in ("_scale", "scale") if hasattr(operand, name)), None)


def _fast_accumulation(left: Any, right: Any) -> bool | None:
    """What the configuration of torchao's tensors asks of their product; ``None`` of others."""
    if not all(hasattr(operand, "_linear_mm_config") for operand in (left, right)):
        return None
    asked = [(operand._gemm_input_role, operand._linear_mm_config) for operand in (left, right)]
    # Beside the class of these tensors, whose module torchao has renamed.
    choose = getattr(import_module(type(left).__module__), "choose_scaled_mm_config", None)
    return bool(choose(*asked[0], *asked[1]).use_fast_accum) if choose is not None else None


def _granularity(scale: torch.Tensor, lines: int, inner: int) -> str:
    """What one scale of an operand is for, by their number; an empty string where that is nothing known."""
    blocks, squares = math.ceil(inner / 128), math.ceil(lines / 128)
    # Of equal numbers the coarsest.
    counts = (1, squares * blocks, lines, lines * blocks, lines * math.ceil(inner / 32))
    known = zip(counts, (TENSOR, SQUARE, LINE, BLOCK, MX), strict=True)
    return next((name for count, name in known if count == scale.numel()), "")


def _values(operand: Any) -> Any:
    """The tensor that holds the operand's values."""
    return next((getattr(operand, name) for name in _HELD if hasattr(operand, name)), operand)


def _of_another_operator(phase: str, operator: str, args: Any, result: Any) -> list[Product]:
    """The product of an operator that :data:`OPERANDS` does not know."""
    given = [
        each for each in args if hasattr(each, "dtype") and str(_values(each).dtype) in _FLOAT8 and each.dim() == 2
    ]
    made = getattr(result, "ndim", 0) == 2 and result.is_floating_point() and str(result.dtype) not in _FLOAT8
    if len(given) < 2 or not made:
        return []
    left, right = given[:2]
    inner = left.numel() // max(1, result.shape[0])
    if inner * result.shape[0] != left.numel() or inner * result.shape[1] != right.numel():
        return []
    product = Product(phase, inner, (result.shape[0], result.shape[1]), "", operator)
    return [_with_formats(product, left, right)]


def _convolution(phase: str, given: Any, weight: Any, output: Any, transposed: bool) -> Product:
    """As a product: each output position (of a transposed convolution: each input position) multiplies the kernel."""
    positions = given if transposed else output
    rows = positions.shape[0] * math.prod(positions.shape[2:])
    return Product(phase, math.prod(weight.shape[1:]), (rows, weight.shape[0]), dtype_name(given), CONVOLUTION)


def _recurrent(phase: str, operator: str, args: Any) -> list[Product]:
    """One product of all rows with each of the layer's weights."""
    given = args[0]
    rows = given.numel() // given.shape[-1]
    # cuDNN's operators take a list of weights, oneDNN's take one layer's two weights.
    weights = [weight for weight in (args[1] if isinstance(args[1], (list, tuple)) else args[1:3]) if weight.dim() == 2]
    one = [Product(phase, w.shape[1], (rows, w.shape[0]), dtype_name(given), RECURRENT) for w in weights]
    return one * RECURRENT_OPERATORS[operator]


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
