"""The spread of healthy arms: written by ``python -m benchmarks.numerics table``, never by hand.

Per library and recipe: the largest distance of a product's SQNR to that of the recipe's own casts (dB), of its gain,
and of a gradient's difference over the difference that moved weights make; on how many samples.
"""

from __future__ import annotations

SPREAD: dict[str, dict[str, float]] = {
    # 92 pairs of 12 cases on cpu, cuda.
    "torchao rowwise": {"sqnr_db": 0.1906, "gain": 0.0011, "gradients": 1.4739, "products": 4752, "parameters": 2749},
    # 92 pairs of 12 cases on cpu, cuda.
    "torchao rowwise_with_gw_hp": {
        "sqnr_db": 0.0,
        "gain": 0.0,
        "gradients": 1.4544,
        "products": 4752,
        "parameters": 2749,
    },
    # 97 pairs of 13 cases on cpu, cuda.
    "torchao tensorwise": {"sqnr_db": 0.3234, "gain": 0.0005, "gradients": 1.874, "products": 4882, "parameters": 2844},
    # 22 pairs of 5 cases on cuda.
    "transformer_engine block": {
        "sqnr_db": 0.3271,
        "gain": 0.0011,
        "gradients": 1.368,
        "products": 1682,
        "parameters": 742,
    },
    # 22 pairs of 5 cases on cuda.
    "transformer_engine current": {
        "sqnr_db": 0.3234,
        "gain": 0.0005,
        "gradients": 1.2421,
        "products": 1682,
        "parameters": 742,
    },
    # 8 pairs of 3 cases on cuda.
    "transformer_engine delayed": {
        "sqnr_db": 3.181,
        "gain": 0.0071,
        "gradients": 1.2607,
        "products": 1176,
        "parameters": 526,
    },
}
