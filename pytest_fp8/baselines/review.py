"""A new measurement against a stored baseline: per metric noise or moved, better or worse; and what to store. Pure.

Loads no numpy, so that the command line answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pytest_fp8.baselines.store import Baseline
from pytest_fp8.rules.change import change_of, figure

EXACT = 1e-9
"""Absolute change up to which a metric without a tolerance counts as unchanged."""
DESCRIPTIVE = ("bf16_ms", "fp8_ms", "loss_twin_gap", "activation_ratio")
"""Informational metrics: never better or worse, since they change with the host or the library."""
TOGETHER = (
    ("speedup", "busy_speedup", "bf16_ms", "fp8_ms"),
    ("loss_gap", "loss_twin_gap"),
    ("memory_ratio", "activation_ratio"),
)
"""Metrics of one measurement: where one of them is rewritten, so are the others."""


@dataclass(frozen=True)
class Change:
    """One metric, old and new. Ratios (``relative``) change by a fraction, other metrics by their own unit."""

    metric: str
    unit: str
    relative: bool
    old: float | None
    new: float | None
    change: float = 0.0
    half_width: float = 0.0
    """Half the width of the change's interval; of a metric with a tolerance, that."""
    word: str = "noise"
    """``same``, ``noise``, ``moved``, ``better``, ``worse``, ``new``, ``more processes``, or ``not measured``."""

    @property
    def rewrites(self) -> bool:
        return self.word not in ("same", "noise", "not measured")


@dataclass(frozen=True)
class Revision:
    """One baseline, old against new."""

    case: str
    gpu: str
    changes: tuple[Change, ...]
    whole: str
    """Why nothing was compared and everything is new: no earlier file, or one of another definition. Else empty."""
    old_provenance: Mapping[str, Any] | None
    """``None`` where nothing was compared."""
    new_provenance: Mapping[str, Any]

    @property
    def rewrites(self) -> bool:
        return bool(self.whole) or any(change.rewrites for change in self.changes)

    @property
    def worse(self) -> bool:
        return any(change.word == "worse" for change in self.changes)

    def origins(self) -> list[str]:
        """Libraries, driver and power limit that differ: ``torch 2.11.0 -> 2.12.0``."""
        if self.old_provenance is None:
            return []
        old, new = _origins(self.old_provenance), _origins(self.new_provenance)
        return [
            f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
            for name in sorted(old | new)
            if old.get(name) != new.get(name)
        ]


def revise(old: Baseline | None, new: Baseline, whole: str = "") -> Revision:
    """Compare two baselines of one case. ``old`` is ``None`` where nothing can be compared; ``whole`` says why."""
    if old is not None and (old.case, old.gpu) != (new.case, new.gpu):
        raise ValueError(f"{old.gpu}/{old.case} and {new.gpu}/{new.case} are not the same baseline")
    if old is not None and old.case_hash != new.case_hash:
        old, whole = None, "the case was redefined: its old numbers are not compared"
    if old is None:
        changes = tuple(_first(name, metric) for name, metric in sorted(new.metrics.items()))
        return Revision(new.case, new.gpu, changes, whole or "no earlier baseline", None, new.provenance)
    changes = tuple(
        compare_metric(name, old.metrics.get(name), new.metrics.get(name))
        for name in sorted(set(old.metrics) | set(new.metrics))
    )
    return Revision(new.case, new.gpu, changes, "", old.provenance, new.provenance)


def revised(old: Baseline | None, new: Baseline, revision: Revision) -> Baseline | None:
    """What to store: the old baseline with the metrics that moved; ``None`` where none did and the file stays.

    Metrics that are kept keep their date and commit, under ``kept`` in the provenance.
    """
    if not revision.rewrites:
        return None
    if old is None or revision.whole:
        return new
    chosen = {change.metric for change in revision.changes if change.rewrites}
    for group in TOGETHER:
        if chosen & set(group):
            chosen |= set(group) & set(new.metrics)
    kept = [name for name in old.metrics if name not in chosen]
    metrics = {**{name: old.metrics[name] for name in kept}, **{name: new.metrics[name] for name in chosen}}
    before = old.provenance.get("kept", {})
    origin = {key: old.provenance[key] for key in ("date", "commit")}
    provenance = {key: value for key, value in new.provenance.items() if key != "kept"}
    if kept:
        provenance["kept"] = {name: before.get(name, origin) for name in sorted(kept)}
    return replace(new, metrics=metrics, provenance=provenance)


def compare_metric(name: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Change:
    """One metric, by the kind of its values: log ratios per process by their noise, others by their tolerance, in nats
    or as a fraction, and without a tolerance by :data:`EXACT`. One of ``old`` and ``new`` may be ``None``."""
    if new is None:
        assert old is not None
        return replace(_first(name, old), old=level(name, old), new=None, word="not measured")
    if old is None:
        return _first(name, new)
    if _per_process(new) != _per_process(old):
        return replace(_first(name, new), old=level(name, old))
    if _per_process(new):
        return _compare_speed(name, old, new)
    return _compare_level(name, old, new)


def level(name: str, metric: Mapping[str, Any]) -> float:
    """One number for a metric: the ratio of a log ratio, the distance from zero of a two-sided one, else the mean."""
    if _per_process(metric):
        return math.exp(figure(metric["values"]))
    if metric["direction"] == "two-sided":
        return math.sqrt(fmean(float(x) ** 2 for x in metric["values"]))
    return fmean(metric["values"])


def _compare_speed(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    moved = change_of(new["values"], [old["values"]])
    difference, half = moved.theta, moved.half_width()
    tolerance = -math.log(1 - float(new["tolerance"]))
    word = _word(difference, abs(difference) > half, abs(difference) > tolerance, name, new["direction"])
    if old["values"] == new["values"]:
        word = "same"
    elif word == "noise" and len(new["values"]) > len(old["values"]):
        word = "more processes"
    return Change(
        name,
        str(new["unit"]),
        True,
        math.exp(figure(old["values"])),
        math.exp(figure(new["values"])),
        math.expm1(difference),
        math.exp(difference) * math.sinh(half),
        word,
    )


def _compare_level(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    first, second = level(name, old), level(name, new)
    tolerance = max(EXACT, float(old["tolerance"]))
    relative = float(old["tolerance"]) > 0 and new["unit"] != "nats" and first > 0
    change = second / first - 1 if relative else second - first
    beyond = abs(change) > tolerance
    word = "same" if old["values"] == new["values"] else _word(change, beyond, beyond, name, new["direction"])
    return Change(name, str(new["unit"]), relative, first, second, change, tolerance, word)


def _word(change: float, beyond_noise: bool, beyond_tolerance: bool, name: str, direction: str) -> str:
    if not beyond_noise:
        return "noise"
    if not beyond_tolerance or name in DESCRIPTIVE or direction not in ("higher", "lower"):
        return "moved"
    return "better" if (change > 0) == (direction == "higher") else "worse"


def _first(name: str, metric: Mapping[str, Any]) -> Change:
    return Change(name, str(metric["unit"]), False, None, level(name, metric), word="new")


def _per_process(metric: Mapping[str, Any]) -> bool:
    return isinstance(metric["values"][0], list | tuple)


def _origins(provenance: Mapping[str, Any]) -> dict[str, str]:
    gpu = provenance["gpu"]
    # A baseline that was measured without a GPU has neither.
    about = {"driver": gpu.get("driver"), "power limit": gpu.get("power_limit")}
    return {**provenance["libraries"], **{name: str(value) for name, value in about.items() if value is not None}}
