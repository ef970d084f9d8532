"""The time of a step's products by role, and of those that FP8 covers in both arms. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fp8.questions.layers.products import FP8, Extents, LayerCall, Product
from pytest_fp8.recipes import RECOMPUTE

OTHER = "other"
"""The role of products that belong to no Linear."""


def role_times(products: Sequence[Product], calls: Iterable[LayerCall]) -> dict[str, float]:
    """``<role> <type>`` -> milliseconds. Where roles share their extents, the time of these products is shared out by
    the number of products that each role needs."""
    recomputed_in = RECOMPUTE if any(product.phase == RECOMPUTE for product in products) else "backward"
    wanted: dict[Extents, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for call in calls:
        for role in call.owed:
            wanted[call.expected(role, recomputed_in)][role] += 1
    times: dict[str, float] = defaultdict(float)
    for product in products:
        roles = wanted.get(product.extents, {OTHER: 1})
        for role, count in roles.items():
            times[f"{role} {product.kind}"] += product.milliseconds * count / sum(roles.values())
    return dict(times)


def covered_by_fp8(bf16: Sequence[Product], fp8: Sequence[Product]) -> tuple[float, float]:
    """Milliseconds, in the reference and in the FP8 arm, of the products that both ran and the FP8 arm ran in FP8.

    Matched by phase and extents, by their FLOPs; what a fused layer multiplies in other extents, by phase alone.
    """
    slow, high, fast = (
        _pools(bf16),
        _pools(product for product in fp8 if product.kind != FP8),
        _pools(product for product in fp8 if product.kind == FP8),
    )
    covered = in_fp8 = 0.0
    left: dict[str, list[_Pool]] = defaultdict(lambda: [_Pool(), _Pool()])
    for extents in {**slow, **fast}:
        mine, theirs = fast.get(extents, _Pool()), slow.get(extents, _Pool())
        both = min(mine.flops, theirs.flops)
        covered += theirs.share(both)
        in_fp8 += mine.share(both)
        pools = left[extents[0]]
        unmatched = max(0, theirs.flops - both - high.get(extents, _Pool()).flops)
        pools[0] = pools[0].more(unmatched, theirs.share(unmatched))
        pools[1] = pools[1].more(mine.flops - both, mine.share(mine.flops - both))
    for theirs, mine in left.values():
        both = min(mine.flops, theirs.flops)
        covered += theirs.share(both)
        in_fp8 += mine.share(both)
    return covered, in_fp8


@dataclass(frozen=True)
class _Pool:
    """Products that count as alike."""

    flops: int = 0
    milliseconds: float = 0.0

    def more(self, flops: int, milliseconds: float) -> _Pool:
        return _Pool(self.flops + flops, self.milliseconds + milliseconds)

    def share(self, flops: int) -> float:
        """Milliseconds of so many of the pool's FLOPs."""
        return self.milliseconds * flops / self.flops if self.flops else 0.0


def _pools(products: Iterable[Product]) -> dict[Extents, _Pool]:
    pools: dict[Extents, _Pool] = {}
    for product in products:
        pools[product.extents] = pools.get(product.extents, _Pool()).more(product.flops, product.milliseconds)
    return pools
