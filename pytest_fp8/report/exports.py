"""What other tools read of a session: JUnit, pytest-benchmark, pytest-html, GitHub, Bencher, github-action-benchmark.

No other file knows them. Whoever needs another one implements ``pytest_fp8_answer``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_fp8.plain import finite
from pytest_fp8.report.cells import interval_of, number, speed_in

if TYPE_CHECKING:
    from pytest_fp8.report.record import Answer, Record

BENCHER, ACTION = "bencher.json", "benchmark-action.json"
"""Bencher Metric Format (`bencher run --adapter json --file`), and `tool: customBiggerIsBetter`."""
PATHS = {
    "fp8_share": ("layers", "fp8_share"),
    "loss_gap": ("loss", "gap"),
    "memory_ratio": ("memory", "ratio"),
}
"""Figure -> question, and name among its numbers."""
LONGEST = 4000
"""Characters of one message on GitHub."""
UNANSWERED = {"error": ("invalid", "inconclusive", "not exercised"), "warning": ("invalid", "inconclusive")}
"""Tests that passed without an answer, by kind. Where they fail nothing, one that needs a baseline is no news."""
OTHERS = "pytest_github_actions_annotate_failures"
"""The plugin that annotates every failed test."""


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


# -- pytest-html ------------------------------------------------------------------------------------------------------


def show_in_html(config: Any, report: Any, answer: Answer, page: Path | None) -> None:
    """Add an answer to what pytest-html shows of a test: its message, its numbers as JSON, and where the ``page`` with
    the pictures is, if this run writes one."""
    html = config.getoption("htmlpath", None)
    if not html or not config.pluginmanager.has_plugin("html") or not answer.judged:
        return
    from pytest_html import extras

    measured = figures({"decisions": {answer.question: answer.decision}})
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{value:.6g}</td></tr>" for name, value in measured.items())
    text = (
        f"<h4>{escape(answer.question)}: {escape(answer.said)}: {escape(answer.headline)}</h4>"
        f"<table>{cells}</table><pre>{escape(answer.message)}</pre>"
    )
    found = [
        extras.html(text),
        extras.json(finite({answer.question: answer.decision}), name=f"{answer.case} {answer.question}: evidence"),
    ]
    report.extras = [*getattr(report, "extras", []), *found]
    if page is not None:
        beside = Path(os.path.expandvars(html)).expanduser().absolute().parent
        link = extras.url(os.path.relpath(page, beside), name="pictures of this run")
        report.extras += [link] if link not in report.extras else []


# -- GitHub -----------------------------------------------------------------------------------------------------------


def below(path: Path, folder: Path) -> str:
    """A path below ``folder`` relative to it; any other as it is."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def commands(
    stats: Mapping[str, Sequence[Any]], root: Path, environment: Mapping[str, str], problems: bool, failures: bool
) -> list[str]:
    """A workflow command, which annotates a pull request, for each FP8 test that failed, unless these ``failures`` are
    left to others, and for each that has no answer: an error where the session has ``problems``, else a warning. Empty
    outside of GitHub's runners.

    ``stats``: the reports of pytest's terminal reporter by kind.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    # GitHub wants paths from the top of the checkout, pytest has them from its own root.
    top = Path(environment.get("GITHUB_WORKSPACE") or root)
    told = (report for kind in ("failed", "error") for report in stats.get(kind, ()))
    # Not by its keywords: a folder may be called fp8. A file that could not be collected is reported by pytest itself.
    failed = [report for report in told if getattr(report, "about_fp8", False)]
    level = "error" if problems else "warning"
    undecided = [report for kind in UNANSWERED[level] for report in stats.get(kind, ())]
    return [
        *(_command("error", report, root, top) for report in failed if failures),
        *(_command(level, report, root, top) for report in undecided),
    ]


def _command(level: str, report: Any, root: Path, top: Path) -> str:
    said = dict(report.user_properties)
    crash = getattr(report.longrepr, "reprcrash", None)
    file, line, _ = report.location
    path, line = root / file, (line or 0) + 1
    if crash is not None and Path(crash.path) == path:
        line = crash.lineno
    verdict = " ".join(filter(None, (said.get("fp8_verdict", "FAIL"), said.get("fp8_code"))))
    title = f"{said.get('fp8_case', report.nodeid.rpartition('::')[2])}: {verdict}"
    message = crash.message if crash is not None else str(said.get("fp8_headline") or report.longreprtext)
    return f"::{level} file={_field(below(path, top))},line={line},title={_field(title)}::{_data(message[:LONGEST])}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# -- files of a report ------------------------------------------------------------------------------------------------


def bencher(report: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Case -> measure -> its value, with the ends of the speedup's interval."""
    found = {}
    for case, entry in report["entries"].items():
        said = figures(entry)
        measures = {name: {"value": said[name]} for name in ("speedup", *PATHS) if name in said}
        if "speedup_low" in said and "speedup_high" in said:
            measures["speedup"] |= {"lower_value": said["speedup_low"], "upper_value": said["speedup_high"]}
        if measures:
            found[case] = measures
    return found


def benchmark_action(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The speedups, of which more is better."""
    found = []
    for case, entry in report["entries"].items():
        middle, low, high = interval_of(entry)
        if middle is not None:
            spread = {} if low is None or high is None else {"range": f"{(high - low) / 2:.4f}"}
            found.append({"name": f"{case}: FP8 over BF16", "unit": "x", "value": middle} | spread)
    return found
