"""One case of a report as a row of a table: its verdict, and the figures of its answers, where they are numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_fp8.case import QUESTIONS
from pytest_fp8.verdicts import WORST_FIRST

NONE = "-"
MOST = 1e300
"""No figure of a report is larger."""


def verdict_of(entry: Mapping[str, Any]) -> str:
    """The worst of a case's answers; an arm's error counts as one, and so do tests that were not run. What fails as
    known does not count beside others."""
    return min(_verdicts(entry, known=False) or _verdicts(entry), key=WORST_FIRST.index, default="NOT_EXERCISED")


def _verdicts(entry: Mapping[str, Any], known: bool = True) -> list[str]:
    """``known``: also of what fails as known."""
    leave_out = [] if known else known_questions(entry)
    said = [decision["verdict"] for question, decision in entry["decisions"].items() if question not in leave_out]
    said += ["FAIL" for _ in not_proved(entry) if known]
    said += ["UNFINISHED"] if entry.get("open_tests") else []
    return said + ["ERROR" for error in entry["errors"] if known or not is_known(entry, error)]


def is_known(entry: Mapping[str, Any], what: str) -> bool:
    """Whether all tests that failed with this question, or with this arm's error, were expected to."""
    return what in entry["known"] and what not in entry["failed"]


def known_questions(entry: Mapping[str, Any]) -> list[str]:
    """The questions of a case that fail as known. One without an answer is none: no test can be expected to end so."""
    decisions = entry["decisions"].items()
    return [question for question, said in decisions if said["verdict"] == "FAIL" and is_known(entry, question)]


def not_proved(entry: Mapping[str, Any]) -> list[str]:
    """The questions of a case of which tests ended as known before there was an answer."""
    without = [what for what in entry["known"] if what in (*QUESTIONS, "faster")]
    return [what for what in without if what not in entry["decisions"] and is_known(entry, what)]


def known_of(entry: Mapping[str, Any]) -> str:
    """What of a case fails as known, in words; empty where nothing does."""
    found = (
        known_questions(entry)
        + not_proved(entry)
        + ["an arm"] * any(is_known(entry, error) for error in entry["errors"])
    )
    if found:
        return f"fails as known: {', '.join(found)}"
    return "a test fails as known" if entry["expected"] else ""


def slower_of(entry: Mapping[str, Any]) -> str:
    """Whether FP8 is slower than BF16 by the clock of whoever trains, though its answer is no failure; else empty."""
    decisions = entry["decisions"]
    shown = next((question for question in ("speedup", "faster") if question in decisions), "")
    verdict = decisions[shown]["verdict"] if shown else "PASS"
    if verdict not in ("PASS", "IMPROVED", "NOT_EXERCISED") and not (verdict == "FAIL" and is_known(entry, shown)):
        return ""
    high = interval_of(entry)[2]
    return "slower, known" if is_known(entry, "faster") else "slower" if high is not None and high < 1 else ""


def all_known(entry: Mapping[str, Any]) -> bool:
    """Whether a case has no answer besides those that are known to be no better."""
    return bool(_verdicts(entry)) and not _verdicts(entry, known=False)


def order_of(entry: Mapping[str, Any]) -> float:
    """To sort cases by: the worst first, those of which all fails as known before what is green."""
    return WORST_FIRST.index("IMPROVED") - 0.5 if all_known(entry) else WORST_FIRST.index(verdict_of(entry))


def tally(entries: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool, int]]:
    """(verdict, whether it is known, number of cases), in the order of :func:`order_of`."""
    counts = Counter((verdict_of(entry), all_known(entry)) for entry in sorted(entries, key=order_of))
    return [(verdict, known, count) for (verdict, known), count in counts.items()]


def cells_of(entry: Mapping[str, Any]) -> list[str]:
    """The cells of :data:`COLUMNS` for files: the interval's ends, and no marks of verdicts."""
    return [(column.whole or column.figures)(entry) or NONE for column in COLUMNS.values()]


def of(question: str, text: str, *names: str) -> Callable[[Mapping[str, Any]], str]:
    """``text.format()`` with these numbers of an entry's answer; empty where one is missing."""

    def figures(entry: Mapping[str, Any]) -> str:
        values = [number(entry["decisions"], question, "numbers", name) for name in names]
        return "" if None in values else text.format(*values)

    return figures


def gradients_of(numbers: Any) -> str:
    """The largest relative difference of a gradient; of gradients that any small change moves, how far their factor is
    from 1; without either, how many products were compared. Empty without any."""
    error, gain, products = (number(numbers, name) for name in ("gradient_error", "gain_error", "products"))
    if error is not None:
        return say("{:.1%}", error)
    if gain is not None:
        return say("factor 1+-{:.2f}", gain)
    return "" if products is None else say("{:.0f} products", products)


def gap_of(numbers: Any) -> str:
    """The gap of the loss and its margin in brackets, rounded alike: a gap above the margin is never shown below it."""
    gap, margin = number(numbers, "gap"), number(numbers, "margin")
    if gap is None or margin is None:
        return ""
    if margin < 0.001:
        # The margin of a loss that ends near zero is a share of it, which four decimals do not show.
        return f"{gap:+.2g} (<{margin:.2g})"
    # The usual margins have three decimals, the last of them a zero already.
    return f"{gap:+.4f} (<{f'{margin:.4f}'.removesuffix('0')})"


def baseline_of(numbers: Mapping[str, Any]) -> str:
    """The stored speedup that a decision's is held against, in words; empty where none is."""
    if numbers.get("on_busy") and (busy := number(numbers, "gated_baseline")) is not None:
        return f"{busy:.3f}x busy"
    steps = number(numbers, "baseline")
    return "" if steps is None else f"{steps:.3f}x"


def interval_of(entry: Mapping[str, Any] | None) -> tuple[float | None, float | None, float | None]:
    """The speedup, and the ends of its 99 % interval."""
    said = speed_in((entry or {}).get("decisions", {}))
    middle, low, high = (number(said, "numbers", name) for name in ("speedup", "low", "high"))
    return middle, low, high


def speedup_of(entry: Mapping[str, Any]) -> str:
    """The speedup of steps with its interval, in words; and that of busy time, where this is judged."""
    middle, low, high = interval_of(entry)
    if middle is None:
        return NONE
    numbers = speed_in(entry["decisions"])["numbers"]
    busy = number(numbers, "gated_speedup") if numbers.get("on_busy") else None
    parts = [say("{:.3f}x", middle), say(" [{:.3f}, {:.3f}]", low, high), say("; {:.3f}x busy", busy)]
    return "".join(part for part in parts if part != NONE)


def number(data: Any, *path: str) -> float | None:
    """``data[path[0]][path[1]]...`` where that is a number, else ``None``."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(data, int | float) or isinstance(data, bool):
        return None
    # An integer may be too large to be one: what reads this leaves out what is not finite.
    return float(data) if abs(data) < MOST else None


def numbers(data: Any, *path: str) -> dict[str, float]:
    """The fields of an object that are numbers."""
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    found = {name: number(data, name) for name in data} if isinstance(data, Mapping) else {}
    return {name: value for name, value in found.items() if value is not None}


def speed_in(decisions: Mapping[str, Any]) -> Any:
    """The decision with the speedup's numbers: against the baseline, or against the floor alone. Empty where neither
    was asked."""
    return decisions.get("speedup") or decisions.get("faster") or {}


def say(text: str, *values: float | None) -> str:
    """``text.format(*values)``; a dash where one is missing."""
    return NONE if None in values else text.format(*values)


def carried_of(entry: Mapping[str, Any]) -> str:
    verdict: str = entry["decisions"].get("checkpoints", {}).get("verdict", "")
    return "yes" if verdict == "PASS" else verdict


@dataclass(frozen=True)
class Column:
    """A column of the tables of cases: in the closing summary, in Markdown and on the page."""

    question: str
    """With those of one question it makes one column of the closing summary."""
    figures: Callable[[Mapping[str, Any]], str]
    """The figures of an entry in words; empty without any."""
    whole: Callable[[Mapping[str, Any]], str] | None = None
    """The same for files, where it says more there."""


COLUMNS = {
    "FP8 layers": Column("layers", of("layers", "{:.0f}/{:.0f}", "converted", "linears")),
    "FP8 FLOPs": Column("layers", of("layers", "{:.1%}", "fp8_share")),
    "gradients off BF16": Column("numerics", lambda e: gradients_of(e["decisions"].get("numerics", {}).get("numbers"))),
    "loss gap": Column("loss", lambda e: gap_of(e["decisions"].get("loss", {}).get("numbers"))),
    "speedup": Column("speedup", lambda e: say("{:.3f}x", interval_of(e)[0]).strip(NONE), speedup_of),
    "baseline": Column("speedup", lambda e: baseline_of(speed_in(e["decisions"]).get("numbers", {}))),
    "memory": Column("memory", of("memory", "{:.2f}x", "ratio")),
    "switch back": Column("checkpoints", lambda e: "yes" if carried_of(e) == "yes" else "", carried_of),
}
"""Name -> column."""
