"""The spread of healthy arms: written by ``python -m benchmarks.numerics table``, never by hand.

Per library and recipe: the largest distance of a product's SQNR to that of the recipe's own casts (dB), of its gain,
and of a gradient's difference over the difference that moved weights make; on how many samples.
"""

from __future__ import annotations

SPREAD: dict[str, dict[str, float]] = {
    # 70 pairs of 7 cases on cpu.
    "torchao rowwise": {"sqnr_db": 0.0, "gain": 0.0, "gradients": 1.4739, "products": 3070, "parameters": 2007},
    # 70 pairs of 7 cases on cpu.
    "torchao rowwise_with_gw_hp": {
        "sqnr_db": 0.0,
        "gain": 0.0,
        "gradients": 1.4544,
        "products": 3070,
        "parameters": 2007,
    },
    # 70 pairs of 7 cases on cpu.
    "torchao tensorwise": {"sqnr_db": 0.0, "gain": 0.0, "gradients": 1.7634, "products": 3070, "parameters": 2007},
}
