"""The files of a run: its journal, which is read again; ``report.json``, summary and page; and what other tools are
given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.codes import R
from pytest_fp8.errors import BaselineError, Fp8Error
from pytest_fp8.plain import PlainDataError, finite, strict_json, to_plain
from pytest_fp8.report.record import JOURNAL, PAGE, REPORT, SCHEMA, SUMMARY, Began, Record
from pytest_fp8.verdicts import WORST_FIRST

if TYPE_CHECKING:
    from pytest_fp8.report.rows import Answer


def read_report(path: Path) -> Record:
    """The record in the journal of a folder, in which ``path`` may be another file. A last line that was cut off is
    left out. Raises :class:`Fp8Error` of two lines."""
    file = (path.parent if path.is_file() else path) / JOURNAL
    try:
        *lines, _ = file.read_text(encoding="utf-8").split("\n")
        record = Record()
        record.add(map(strict_json, lines))
        first = record.lines[0] if record.lines else None
        if not isinstance(first, Began) or first.schema != SCHEMA:
            raise PlainDataError(f"it does not begin with schema {SCHEMA}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        said = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise Fp8Error(
            R.NOT_A_REPORT,
            f"{str(file)!r} is no journal of this pytest-fp8: {said}"[:500],
            next_step="run the tests again with --fp8-report",
        ) from None
    return record


def write_report(folder: Path, record: Record) -> Path:
    """Write ``report.json``; gives its path. Raises :class:`BaselineError`."""
    names = "not_run ran ran_on_gpu collected partial durations failed_tests open_tests finished problems provenance"
    told = {
        "schema": SCHEMA,
        "entries": {name: row.plain() for name, row in record.entries.items()},
        **{name: to_plain(getattr(record, name)) for name in names.split()},
    }
    path = folder / REPORT
    write_atomically(path, json.dumps(finite(told), indent=1, default=str, allow_nan=False) + "\n")
    return path


def write_beside(folder: Path, record: Record, environment: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """What people read, beside ``report.json``: the summary, which also goes where GitHub shows it, and the page. Gives
    the paths, and notes on what could not be written, which fails no session."""
    from pytest_fp8.report.page import render
    from pytest_fp8.report.table import markdown

    summary, github = markdown(record), environment.get("GITHUB_STEP_SUMMARY", "")
    written, notes = [], []
    for path, text in ((folder / SUMMARY, summary), (folder / PAGE, render(folder.name, record))):
        try:
            write_atomically(path, text)
            written.append(path)
        except BaselineError as error:
            notes.append(f"not all of the report was written: {error.headline}")
    try:
        if github:
            with Path(github).open("a", encoding="utf-8") as stream:
                stream.write(summary)
    except OSError as error:
        notes.append(f"the summary was not added to GITHUB_STEP_SUMMARY={github}: {error.strerror}")
    return written, notes


# -- pytest-fp8 report ------------------------------------------------------------------------------------------------


def add_report(commands: Any) -> None:
    """Add ``report`` to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("report", help="the HTML page of a session, also of one that was killed")
    add.add_argument("report", type=Path, metavar="DIR", help="folder of --fp8-report")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and say where; gives the exit code 0. Raises :class:`Fp8Error`."""
    from pytest_fp8.report.page import render

    folder: Path = options.report if options.report.is_dir() else options.report.parent
    # A page is shown to others, whom the folders of this machine do not concern.
    write_atomically(folder / PAGE, render(folder.resolve().name, read_report(folder)))
    print(f"wrote {folder / PAGE}")
    return 0


# -- what other tools read of a test ----------------------------------------------------------------------------------


def properties(case: str, verdict: str, answers: Sequence[Answer]) -> list[tuple[str, object]]:
    """Of a test, as JUnit files have them. ``answers``: what it was told."""
    told: list[tuple[str, object]] = [("fp8_case", case), ("fp8_verdict", verdict)]
    told += [("fp8_code", each.code) for each in answers if each.code][-1:]
    return told + [("fp8_headline", each.headline) for each in answers[-1:]]


def told_verdict(report: Any, answers: Sequence[Answer]) -> str:
    """The verdict of a test, shown in place of PASSED: the worst of its answers; FAIL of one that failed, also as
    expected where its answers pass. ``report``: pytest's, of its call."""
    if report.skipped and not hasattr(report, "wasxfail"):
        return "NOT_EXERCISED"
    worst = min((each.verdict for each in answers), key=WORST_FIRST.index, default="PASS")
    return "FAIL" if report.failed or (report.skipped and worst in ("PASS", "IMPROVED")) else worst


def add_rows(config: Any, record: Record) -> None:
    """Step times as rows of pytest-benchmark's own table: a group of two rows for each case whose speed was asked, BF16
    and FP8, with one entry per block. Nothing where pytest-benchmark is absent or disabled (also by xdist).

    They have no verdict: pytest-benchmark compares means of one arm, this plugin paired blocks of both.
    """
    # pytest-benchmark offers no public name for its session.
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or benchmarks.disabled:
        return
    from pytest_benchmark.stats import Metadata

    timed = [row for row in record.entries.values() if row.speed is not None and row.timing]
    for row, arm in ((row, arm) for row in timed for arm in ("bf16", "fp8")):
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
