"""What other tools read of a test: its properties, as JUnit files have them, and rows of pytest-benchmark.

Whoever needs another one implements ``pytest_fp8_answer``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_fp8.report.cells import interval_of, number, speed_in

if TYPE_CHECKING:
    from pytest_fp8.report.record import Answer, Record

PATHS = {
    "fp8_share": ("layers", "fp8_share"),
    "loss_gap": ("loss", "gap"),
    "memory_ratio": ("memory", "ratio"),
}
"""Figure -> question, and name among its numbers."""


def figures(entry: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a case that were measured: shares and ratios as numbers, the loss gap in nats."""
    said = entry["decisions"]
    middle, low, high = interval_of(entry)
    found = {name: number(said, question, "numbers", field) for name, (question, field) in PATHS.items()}
    found |= {"speedup": middle, "speedup_low": low, "speedup_high": high}
    found["speedup_limit"] = number(speed_in(said), "numbers", "account", "limit")
    return {name: value for name, value in found.items() if value is not None}


# -- JUnit, and whoever reads a test's properties ---------------------------------------------------------------------


def properties(case: str, verdict: str, decisions: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, object]]:
    """Of a test. ``decisions``: those that the test asked for, by question."""
    said = figures({"decisions": decisions})
    headlines = [("fp8_headline", decision["headline"]) for decision in decisions.values()][-1:]
    codes = [("fp8_code", code) for decision in decisions.values() if (code := decision.get("code"))][-1:]
    measured = [(name if name.startswith("fp8_") else f"fp8_{name}", round(value, 6)) for name, value in said.items()]
    return [("fp8_case", case), ("fp8_verdict", verdict), *codes, *headlines, *measured]


def told_verdict(report: Any, decisions: Mapping[str, Mapping[str, Any]]) -> str:
    """The verdict of a test: of one that passed the worst of its decisions, shown in place of PASSED; of one that
    failed as expected FAIL, or the missing answer that it failed with. ``report``: pytest's, of its call."""
    said = {decision["verdict"] for decision in decisions.values()}
    if report.skipped and not hasattr(report, "wasxfail"):
        return "NOT_EXERCISED"
    if report.passed:
        return next((word for word in ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED", "IMPROVED") if word in said), "PASS")
    return "FAIL" if report.failed else next((w for w in ("FAIL", "INVALID", "INCONCLUSIVE") if w in said), "FAIL")


# -- pytest-benchmark -------------------------------------------------------------------------------------------------


def add_rows(config: Any, answer: Answer, record: Record) -> None:
    """Step times as rows of pytest-benchmark's own table: a group of two rows for the case of an answer on its speed,
    BF16 and FP8, with one entry per block. Nothing where pytest-benchmark is absent or disabled (also by xdist).

    They have no verdict: pytest-benchmark compares means of one arm, this plugin paired blocks of both.
    """
    # pytest-benchmark offers no public name for its session.
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or benchmarks.disabled or answer.question not in ("faster", "speedup"):
        return
    from pytest_benchmark.stats import Metadata

    row = record.row_of(answer)
    benchmarks.benchmarks[:] = [each for each in benchmarks.benchmarks if each.group != row.case]
    for arm in ("bf16", "fp8") if row.timing else ():
        described = SimpleNamespace(
            name=f"{row.case}[{arm}]",
            fullname=f"pytest-fp8::{row.case}[{arm}]",
            group=row.case,
            param=None,
            params=None,
            extra_info={"unit": "s per training step", "case_hash": row.case_hash},
            cprofile_stats=None,
            has_error=False,
        )
        benchmark = Metadata(described, iterations=1, options={})
        for milliseconds in (time for process in row.timing["processes"] for time in process[arm]):
            benchmark.stats.update(milliseconds / 1000)
        benchmarks.benchmarks.append(benchmark)


def below(path: Path, folder: Path) -> str:
    """A path below ``folder`` relative to it; any other as it is."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
