"""torch's operators for matrix products: which arguments are the operands, and the products that a call computes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
"""Operator -> the positions of its left and right operand."""
RECURRENT_OPERATORS = {
    "mkldnn_rnn_layer": 1,
    "mkldnn_rnn_layer_backward": 2,
    "_cudnn_rnn": 1,
    "_cudnn_rnn_backward": 2,
}
"""Operator of a recurrent layer -> products of each weight in one call: the backward pass has two."""
_FLOAT8 = {f"torch.float8_{name}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}


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
        product = product_of(phase, operator, tuple(left.shape), tuple(right.shape), kind_of(left, right))
        formats = operand_formats(*(str(getattr(operand, "_data", operand).dtype) for operand in (left, right)))
        return [replace(product, formats=formats)]
    if operator in ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"):
        transposed = operator == "convolution" and args[6]
        return [_convolution(phase, args[0], args[1], result, transposed)]
    if operator == "convolution_backward":
        gradient, given, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        return [_convolution(phase, given, weight, gradient, transposed)] * sum(map(bool, wanted[:2]))
    if operator in RECURRENT_OPERATORS:
        return _recurrent(phase, operator, args)
    return []


def kind_of(left: Any, right: Any) -> str:
    """``fp8`` where both operands hold FP8 values (torchao's tensors keep theirs in ``_data``), ``mixed`` where one
    does, else the left operand's dtype."""
    dtypes = [getattr(operand, "_data", operand).dtype for operand in (left, right)]
    if all(str(dtype) in _FLOAT8 for dtype in dtypes):
        return FP8
    if any(str(dtype) in _FLOAT8 for dtype in dtypes):
        return "mixed"
    return dtype_name(left)


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
