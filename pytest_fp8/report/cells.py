"""One case of a report as a row of a table: its verdict, and the figures of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_fp8.report.numbers import NONE, number, say

VERDICTS = ("FAIL", "ERROR", "INVALID", "INCONCLUSIVE", "NOT_EXERCISED", "IMPROVED", "PASS")
"""The worst first."""
COLUMNS = ("FP8 layers", "FP8 FLOPs", "gradients off BF16", "loss gap", "speedup", "baseline", "memory", "switch back")


def verdict_of(entry: Mapping[str, Any]) -> str:
    """The worst of a case's answers; an arm's error counts as one. Answers that are known to be no better do not count
    where there are others."""
    said = [decision["verdict"] for decision in entry["decisions"].values() if not decision.get("as_known")]
    said += ["ERROR"] if entry["errors"] else []
    said = said or [decision["verdict"] for decision in entry["decisions"].values()]
    return min(said, key=VERDICTS.index, default="NOT_EXERCISED")


def known_of(entry: Mapping[str, Any]) -> str:
    """Which questions of a case fail as known, in words; empty where none does."""
    questions = [question for question, decision in entry["decisions"].items() if decision.get("as_known")]
    if not entry["expected"]:
        return ""
    return f"fails as known: {', '.join(questions)}" if questions else "a test fails as known"


def tally(entries: Iterable[Mapping[str, Any]]) -> tuple[list[tuple[str, int]], str]:
    """How many cases have which verdict, the worst first; and in words, of how many something fails as known."""
    entries = list(entries)
    counts = Counter(map(verdict_of, entries))
    known = sum(bool(entry["expected"]) for entry in entries)
    words = f"in {known} case{'s' if known != 1 else ''} something fails as known" if known else ""
    return [(verdict, counts[verdict]) for verdict in VERDICTS if counts[verdict]], words


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
    """The speedup of steps with its interval, in words; and that of busy time, where this is judged."""
    middle, low, high = interval_of(entry)
    if middle is None:
        return NONE
    said, speed = entry["decisions"], "speedup" if "speedup" in entry["decisions"] else "faster"
    on_busy = said[speed]["numbers"].get("gated_on") == "busy time"
    busy = number(said, speed, "numbers", "gated_speedup") if on_busy else None
    parts = [say("{:.3f}x", middle), say(" [{:.3f}, {:.3f}]", low, high), say("; {:.3f}x busy", busy)]
    return "".join(part for part in parts if part != NONE)
