"""The spread of healthy arms: written by ``python -m benchmarks.numerics table``, never by hand.

Per library and recipe: the largest distance of a product's SQNR to that of the recipe's own casts (dB), of its gain,
and of a gradient's difference over the difference that moved weights make; on how many samples.
"""

from __future__ import annotations

SPREAD: dict[str, dict[str, float]] = {}
