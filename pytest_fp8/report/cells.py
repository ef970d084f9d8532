"""One case of a report as a row of a table: its verdict, and the figures of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.report.numbers import NONE, number, say

VERDICTS = ("FAIL", "ERROR", "INVALID", "INCONCLUSIVE", "NOT_EXERCISED", "IMPROVED", "PASS")
"""The worst first."""
COLUMNS = ("FP8 layers", "FP8 FLOPs", "gradients off BF16", "loss gap", "speedup", "baseline", "memory", "switch back")


def verdict_of(entry: Mapping[str, Any]) -> str:
    """The worst of a case's answers; an arm's error counts as one."""
    said = [decision["verdict"] for decision in entry["decisions"].values()]
    said += ["ERROR"] if entry["errors"] else []
    return min(said, key=VERDICTS.index, default="NOT_EXERCISED")


def cells_of(entry: Mapping[str, Any]) -> list[str]:
    """The cells of :data:`COLUMNS`, as the closing summary of a run has them."""
    said = entry["decisions"]

    def of(question: str, name: str) -> float | None:
        return number(said, question, "numbers", name)

    speed = "speedup" if "speedup" in said else "faster"
    carried = said.get("checkpoints")
    return [
        say("{:.0f}/{:.0f}", of("layers", "converted"), of("layers", "linears")),
        say("{:.1%}", of("layers", "fp8_share")),
        say("{:.1%}", of("numerics", "gradient_error")),
        say("{:+.4f} (<{:.3g})", of("loss", "gap"), of("loss", "margin")),
        speedup_of(entry),
        say("{:.3f}x", of(speed, "baseline")),
        say("{:.2f}x", of("memory", "ratio")),
        NONE if carried is None else "yes" if carried["verdict"] == "PASS" else carried["verdict"],
    ]


def interval_of(entry: Mapping[str, Any] | None) -> tuple[float | None, float | None, float | None]:
    """The speedup, and the ends of its 99 % interval."""
    said = (entry or {}).get("decisions", {})
    speed = "speedup" if "speedup" in said else "faster"
    middle, low, high = (number(said, speed, "numbers", name) for name in ("speedup", "low", "high"))
    return middle, low, high


def speedup_of(entry: Mapping[str, Any]) -> str:
    """The speedup with its interval, in words."""
    middle, low, high = interval_of(entry)
    interval = say(" [{:.3f}, {:.3f}]", low, high)
    return say("{:.3f}x", middle) + (interval if middle is not None and interval != NONE else "")
