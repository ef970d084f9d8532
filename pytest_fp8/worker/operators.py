"""torch's operators for matrix products: which arguments are the operands, and the product that a call computes."""

from __future__ import annotations

from pytest_fp8.questions.layers.products import Product

OPERANDS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    # One product per expert; the left operand holds the rows of all. transformers has its own where torch has none.
    "_grouped_mm": (0, 1),
    "transformers::grouped_mm_fallback": (0, 1),
    "_scaled_mm": (0, 1),
    "_scaled_mm_v2": (0, 1),
}
"""Operator -> the positions of its left and right operand."""


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
