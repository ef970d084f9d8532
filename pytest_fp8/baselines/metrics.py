"""The metrics that a baseline can hold: unit, direction, range and tolerance of each. A file says none of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_fp8.baselines.strict import Unsound, between, sized
from pytest_fp8.case import Case
from pytest_fp8.stats.loss import LOSS_MARGIN

EXACT = 1e-9
"""Absolute change up to which a metric without a tolerance counts as unchanged."""


@dataclass(frozen=True)
class Metric:
    """What the code knows of a metric."""

    unit: str
    direction: str
    """``higher`` or ``lower`` is better, or ``two-sided``: distance from zero counts."""
    question: str
    """The question that measures it, by its name in :data:`pytest_fp8.case.QUESTIONS`."""
    values: Any
    """The annotation of what a file holds of it."""
    tolerance: float = 0.0
    """As a fraction, or absolute for ``nats``; 0: any change counts. Of a speedup and a loss: where the case's own is
    not known."""
    informational: bool = False
    """Never better or worse, since it changes with the host or the library."""

    @property
    def per_process(self) -> bool:
        return self.unit.startswith("log ratio")


def _listed(kind: Any, low: float, high: float, most: int = 64) -> Any:
    return _some(Annotated[kind, between(low, high)], most)


def _some(kind: Any, most: int = 64) -> Any:
    return Annotated[Sequence[kind], sized(1, most)]


def _ratios(unit: str) -> Metric:
    # A hundred times faster or slower is no measurement of one step.
    blocks = _listed(float, -math.log(100), math.log(100))
    return Metric(unit, "higher", "speedup", _some(blocks), Case.tolerance)


def _count(unit: str) -> Metric:
    return Metric(unit, "higher", "layers", _listed(int, 0, 1e6, most=1))


_MILLISECONDS = Metric("ms per step", "lower", "speedup", _listed(float, 1e-6, 1e7), 0.08, informational=True)


def _account(unit: str, direction: str) -> Metric:
    # Where a step went is no process's own, and says nothing that a gate asks.
    return Metric(unit, direction, "speedup", _listed(float, -1e7, 1e7, most=1), 0.08, informational=True)


ACCOUNT: Mapping[str, Metric] = {
    "bf16_busy_ms": _account("ms per step", "lower"),
    "fp8_busy_ms": _account("ms per step", "lower"),
    "bf16_wire_ms": _account("ms per step", "lower"),
    "fp8_wire_ms": _account("ms per step", "lower"),
    "earned_ms": _account("ms per step", "higher"),
    "casts_ms": _account("ms per step", "lower"),
    "speedup_limit": _account("limit, BF16 over FP8 step time", "higher"),
}
"""The account of a speedup (:mod:`pytest_fp8.questions.speed.account`): the time in which the GPU works; what nothing
hides of the wire between several; what FP8 products earned and other kernels cost; the limit, of what is gated on."""
_GAPS = _listed(float, -1e9, 1e9)
_OVER_BF16 = _listed(float, 1e-6, 1e3)

METRICS: Mapping[str, Metric] = {
    "speedup": _ratios("log ratio, BF16 over FP8 step time"),
    "busy_speedup": _ratios("log ratio, BF16 over FP8 busy time"),
    "bf16_ms": _MILLISECONDS,
    "fp8_ms": _MILLISECONDS,
    "fp8_share": Metric("share of GEMM FLOPs", "higher", "layers", _listed(float, 0, 1 + 1e-9, most=1)),
    "fp8_layers": _count("Linears in FP8"),
    **{f"fp8_{role}": _count(f"{role} products in FP8 per step") for role in ("fprop", "dgrad", "wgrad", "recompute")},
    "loss_gap": Metric("nats", "lower", "loss", _GAPS, LOSS_MARGIN[0]),
    "loss_twin_gap": Metric("nats", "two-sided", "loss", _GAPS, LOSS_MARGIN[0], informational=True),
    "memory_ratio": Metric("FP8 over BF16 peak of allocated bytes", "lower", "memory", _OVER_BF16, 0.02),
    "activation_ratio": Metric(
        "FP8 over BF16 bytes that the forward pass adds", "lower", "memory", _OVER_BF16, 0.02, informational=True
    ),
    **ACCOUNT,
}
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "layers": ("fp8_share", "fp8_layers"),
    "loss": ("loss_gap", "loss_twin_gap"),
    "speedup": ("speedup", "bf16_ms", "fp8_ms"),
    "memory": ("memory_ratio",),
}
"""Question -> the metrics that a case which asks it must have stored."""


def informational(name: str, gated: str) -> bool:
    """Whether a metric is never better or worse: by itself, or since another is ``gated`` on in its place."""
    return METRICS[name].informational or (name in ("speedup", "busy_speedup") and name != gated)


def lacking(case: Case, held: Sequence[str]) -> list[str]:
    """The metrics that a baseline of this case must have and that are not among those ``held``."""
    return [name for question, names in REQUIRED.items() if case.asks(question) for name in names if name not in held]


def check_agreement(metrics: Mapping[str, Sequence[Any]], where: str) -> None:
    """A speedup stands beside the step times of the same processes; an account is whole, beside a speedup. Raises
    :class:`Unsound`."""
    whole = {name for name in ACCOUNT if "wire" not in name or "bf16_wire_ms" in metrics or "fp8_wire_ms" in metrics}
    lacks = sorted({"speedup", *whole} - set(metrics))
    if lacks and any(name in metrics for name in ACCOUNT):
        raise Unsound(f"{where} has a part of an account, and lacks {', '.join(lacks)}")
    sizes = {len(metrics.get(name, ())) for name in ("speedup", "bf16_ms", "fp8_ms")}
    if "speedup" in metrics and len(sizes) > 1:
        raise Unsound(f"{where} has a speedup without bf16_ms and fp8_ms of each of its processes")
