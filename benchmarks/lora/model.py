"""Step times over adapter ranks: the model, its least-squares fit, and what it says. Pure.

    t_arm(rank) = base_arm + weight * (adapters + slope * rank)          all in milliseconds per step

``base_arm`` is the frozen model with its optimizer and losses: what FP8 can speed up, so each arm has its own. The rest
is the adapters, which stay in BF16, so both arms share it. It has two parts because an adapter on a Linear from K to N
features costs 2 * tokens * rank * (K + N) FLOPs a pass, which grow with the rank, and reads and writes tokens * (K + N)
values, which do not: the time of a product with few columns goes with the values it moves. Both grow with K + N, so
that ``weight`` is the adapted Linears' share of the K + N of all of a block's Linears, and 1 where all of them are
adapted.

With one ``weight`` alone, base and ``adapters`` occur only as a sum and cannot be separated: ``adapters`` is then
``None``, the bases contain it, and the adapters' part is a lower bound. Rank 0 is no point of this line: it trains
every weight, and so has weight gradients and an optimizer state that a frozen base does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pytest_fp8.zoo.shapes import Shape

RANKS = 3
"""With fewer ranks a line always fits, and there is no residual to judge it by."""


@dataclass(frozen=True)
class Point:
    """One case: its rank, its ``weight``, and milliseconds per step of each process of both arms."""

    rank: int
    bf16_ms: tuple[float, ...]
    fp8_ms: tuple[float, ...]
    weight: float = 1.0

    @property
    def speedup(self) -> float:
        return float(np.mean(self.bf16_ms) / np.mean(self.fp8_ms))


@dataclass(frozen=True)
class Fit:
    """The fitted model; milliseconds, ``slope`` in milliseconds per rank. ``errors``: standard errors by name."""

    bf16_base: float
    fp8_base: float
    adapters: float | None
    slope: float
    errors: dict[str, float]
    slopes: tuple[float, float]
    """Of the BF16 and of the FP8 arm, each fitted alone: they should agree, since adapters are BF16 in both."""

    def adapter_ms(self, rank: int, weight: float = 1.0) -> float:
        """The adapters' part of a step in either arm; a lower bound where ``adapters`` is ``None``."""
        return weight * ((self.adapters or 0.0) + self.slope * rank)

    def speedup(self, rank: int, weight: float = 1.0) -> float:
        part = self.adapter_ms(rank, weight)
        return (self.bf16_base + part) / (self.fp8_base + part)

    def share(self, rank: int, weight: float = 1.0) -> float:
        """The adapters' part of the FP8 step, as a fraction."""
        part = self.adapter_ms(rank, weight)
        return part / (self.fp8_base + part)


def weight_of(shape: Shape, targets: Sequence[str]) -> float:
    """The adapted Linears' share of K + N over a block's Linears; no targets means all of them."""
    head_dim = shape.head_dim or shape.hidden // shape.heads
    query, key, hidden, wide = shape.heads * head_dim, shape.kv_heads * head_dim, shape.hidden, shape.intermediate
    features = {
        "q_proj": hidden + query,
        "k_proj": hidden + key,
        "v_proj": hidden + key,
        "o_proj": query + hidden,
        "gate_proj": hidden + wide,
        "up_proj": hidden + wide,
        "down_proj": wide + hidden,
    }
    return sum(features[name] for name in targets or features) / sum(features.values())


def fit(points: Sequence[Point]) -> Fit:
    """Ordinary least squares over every process of every point with adapters.

    Raises ``ValueError`` for fewer than :data:`RANKS` different ranks.
    """
    adapted = [point for point in points if point.rank]
    if len({point.rank for point in adapted}) < RANKS:
        raise ValueError(f"a line over ranks needs {RANKS} of them, not {len({p.rank for p in adapted})}")
    separable = len({round(point.weight, 6) for point in adapted}) > 1
    names = ["bf16_base", "fp8_base", "slope", *(["adapters"] if separable else [])]
    rows, times = [], []
    for point in adapted:
        for fp8, values in ((False, point.bf16_ms), (True, point.fp8_ms)):
            row = [float(not fp8), float(fp8), point.weight * point.rank, *([point.weight] if separable else [])]
            rows += [row] * len(values)
            times += list(values)
    found, errors = _least_squares(np.array(rows), np.array(times))
    by_name = dict(zip(names, found, strict=True))
    return Fit(
        by_name["bf16_base"],
        by_name["fp8_base"],
        by_name.get("adapters"),
        by_name["slope"],
        dict(zip(names, errors, strict=True)),
        (_slope(adapted, "bf16_ms", separable), _slope(adapted, "fp8_ms", separable)),
    )


def _slope(points: Sequence[Point], arm: str, separable: bool) -> float:
    rows = [
        [1.0, point.weight * point.rank, *([point.weight] if separable else [])]
        for point in points
        for _ in getattr(point, arm)
    ]
    times = [value for point in points for value in getattr(point, arm)]
    return _least_squares(np.array(rows), np.array(times))[0][1]


def _least_squares(rows: np.ndarray, times: np.ndarray) -> tuple[list[float], list[float]]:
    """Coefficients and their standard errors, from the residuals' own spread."""
    found, *_ = np.linalg.lstsq(rows, times, rcond=None)
    freedom = max(1, len(times) - rows.shape[1])
    variance = float(np.sum((times - rows @ found) ** 2)) / freedom
    errors = np.sqrt(np.diag(variance * np.linalg.pinv(rows.T @ rows)))
    return [float(x) for x in found], [float(x) for x in errors]
