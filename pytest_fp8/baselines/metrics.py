"""The metrics that a baseline can hold: unit, direction, range and tolerance of each. A file says none of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pytest_fp8.case import Case
from pytest_fp8.plain import between, sized
from pytest_fp8.stats.loss import LOSS_MARGIN

EXACT = 1e-9
"""Absolute change up to which a metric without a tolerance counts as unchanged."""


@dataclass(frozen=True)
class Metric:
    """What the code knows of a metric."""

    unit: str
    direction: str
    """``higher`` or ``lower`` is better."""
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


def _some(kind: Any) -> Any:
    return Annotated[Sequence[kind], sized(1, 64)]


def _listed(low: float, high: float) -> Any:
    return _some(Annotated[float, between(low, high)])


# A hundred times faster or slower is no measurement of one step.
_RATIOS = _some(_listed(-math.log(100), math.log(100)))
_GAPS, _OVER_BF16, _COUNTED = _listed(-1e9, 1e9), _listed(1e-6, 1e3), _listed(0, 1e6)
_MS = Metric("ms per step", "lower", "speedup", _listed(1e-6, 1e7), 0.08, informational=True)
# Where a step went is no process's own, and says nothing that a gate asks.
_SPENT = Metric("ms per step", "lower", "speedup", _GAPS, 0.08, informational=True)
_SPEED, _LOSS = ("speedup", _RATIOS, Case.tolerance), ("loss", _GAPS, LOSS_MARGIN)

ACCOUNT: Mapping[str, Metric] = {
    **dict.fromkeys(("bf16_busy_ms", "fp8_busy_ms", "bf16_wire_ms", "fp8_wire_ms", "casts_ms"), _SPENT),
    "earned_ms": Metric("ms per step", "higher", "speedup", _GAPS, 0.08, informational=True),
    "speedup_limit": Metric("limit, BF16 over FP8 step time", "higher", "speedup", _GAPS, 0.08, informational=True),
}
"""The account of a speedup (:mod:`pytest_fp8.questions.speed.account`): the time in which the GPU works; what nothing
hides of the wire between several; what FP8 products earned and other kernels cost; the limit, of what is gated on."""

METRICS: Mapping[str, Metric] = {
    "speedup": Metric("log ratio, BF16 over FP8 step time", "higher", *_SPEED),
    "busy_speedup": Metric("log ratio, BF16 over FP8 busy time", "higher", *_SPEED),
    "bf16_ms": _MS,
    "fp8_ms": _MS,
    "fp8_share": Metric("share of GEMM FLOPs", "higher", "layers", _listed(0, 1 + 1e-9)),
    "fp8_layers": Metric("Linears in FP8", "higher", "layers", _COUNTED),
    **{
        f"fp8_{role}": Metric(f"{role} products in FP8 per step", "higher", "layers", _COUNTED)
        for role in ("fprop", "dgrad", "wgrad", "recompute")
    },
    "loss_gap": Metric("nats", "lower", *_LOSS),
    # Of older sessions: BF16 against itself one rounding apart, which is no longer measured.
    "loss_twin_gap": Metric("nats", "lower", *_LOSS, informational=True),
    "memory_ratio": Metric("FP8 over BF16 peak of allocated bytes", "lower", "memory", _OVER_BF16, 0.02),
    "activation_ratio": Metric(
        "FP8 over BF16 bytes that the forward pass adds", "lower", "memory", _OVER_BF16, 0.02, informational=True
    ),
    **ACCOUNT,
}
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "layers": ("fp8_share", "fp8_layers"),
    "loss": ("loss_gap",),
    "speedup": ("speedup", "bf16_ms", "fp8_ms"),
    "memory": ("memory_ratio",),
}
"""Question -> the metrics that a case which asks it must have stored."""


def informational(name: str, gated: str) -> bool:
    """Whether a metric is never better or worse: by itself, or since another is ``gated`` on in its place."""
    return METRICS[name].informational or (name in ("speedup", "busy_speedup") and name != gated)
