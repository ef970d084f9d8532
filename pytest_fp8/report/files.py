"""The files of a run: ``report.json`` and who reads it, summary and page beside it, and what other tools are given."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.codes import R
from pytest_fp8.errors import BaselineError, Fp8Error
from pytest_fp8.plain import PlainDataError, finite, from_plain, strict_json, to_plain
from pytest_fp8.report.record import JOURNAL, Began, Record, read_journal
from pytest_fp8.report.rows import SCHEMA, Origin, Report, Row, number

if TYPE_CHECKING:
    from pytest_fp8.report.record import Answer

REPORT, SUMMARY, PAGE = "report.json", "summary.md", "index.html"


# -- report.json ------------------------------------------------------------------------------------------------------


def report_of(record: Record, origin: Mapping[str, Any], problems: Sequence[str] = (), finished: bool = True) -> Report:
    """``origin``: the provenance of this session's measurements; an emulated case used no GPU."""
    rows = list(record.entries.values())
    gpu = {"name": "emulated"} if rows and rows[0].gpu == "emulated" else origin["gpu"]
    return Report(
        schema=SCHEMA,
        entries=record.entries,
        not_run=record.not_run,
        ran=record.ran,
        ran_on_gpu=record.ran_on_gpu,
        collected=record.collected,
        partial=record.partial,
        durations=record.durations,
        failed_tests=record.failed_tests,
        open_tests=record.open_tests,
        finished=finished,
        problems=problems,
        provenance=from_plain(Origin, {**origin, "gpu": gpu}),
    )


def read_report(path: Path) -> Report:
    """The report in a file, or in the ``report.json`` of a folder. Raises :class:`Fp8Error` of two lines."""
    file = path / REPORT if path.is_dir() else path
    try:
        report = from_plain(Report, strict_json(file.read_text(encoding="utf-8")), "the report")
        if report.schema != SCHEMA:
            raise PlainDataError(f"the report's schema is {report.schema}, not {SCHEMA}")
    except (OSError, ValueError, RecursionError) as error:
        said = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise Fp8Error(
            R.NOT_A_REPORT,
            f"{str(file)!r} is no report of this pytest-fp8: {said}"[:500],
            next_step="run the tests again with --fp8-report",
        ) from None
    return report


def write_report(folder: Path, report: Report) -> Path:
    """Write ``report.json``; gives its path. Raises :class:`BaselineError`."""
    path = folder / REPORT
    write_atomically(path, json.dumps(finite(to_plain(report)), indent=1, default=str, allow_nan=False) + "\n")
    return path


def write_beside(folder: Path, report: Report, environment: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """What people read, beside ``report.json``: the summary, which also goes where GitHub shows it, and the page of a
    session that asked something. Gives the paths, and notes on what could not be written, which fails no session."""
    from pytest_fp8.report.page import render
    from pytest_fp8.report.table import markdown

    summary, github = markdown(report), environment.get("GITHUB_STEP_SUMMARY", "")
    files = {folder / SUMMARY: summary} | (
        {folder / PAGE: render([(str(folder.name), report)])} if report.entries else {}
    )
    written, notes = [], []
    for path, text in files.items():
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


def recover(folder: Path) -> list[Path]:
    """Write ``report.json`` from the journal of a session that was killed or still runs; gives the report's path, or
    nothing without a journal. Raises :class:`Fp8Error`."""
    journal = folder / JOURNAL
    if not journal.exists():
        return []
    try:
        record = read_journal(journal)
        began = next(line for line in record.lines if isinstance(line, Began))
        report = report_of(record, began.provenance, finished=False)
    except (OSError, ValueError, TypeError, LookupError, StopIteration) as error:
        raise Fp8Error(
            R.NOT_A_REPORT,
            f"{str(journal)!r} is no journal of this pytest-fp8: {type(error).__name__}: {error}"[:500],
            next_step=f"remove it to read the report beside it: rm {shlex.quote(str(journal))}",
        ) from None
    return [write_report(folder, report)]


def holds_report(folder: Path) -> bool:
    """Whether a session has left its report there."""
    return (folder / REPORT).is_file()


def remove_report(folder: Path) -> None:
    """Remove what lies beside a session's report in a folder, where one is; the next takes the place of the report.
    Files of others stay."""
    for name in (SUMMARY, PAGE) if holds_report(folder) else ():
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


# -- pytest-fp8 report ------------------------------------------------------------------------------------------------


def add_report(commands: Any) -> None:
    """Add ``report`` to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("report", help="one HTML page with pictures, from one report or several")
    add.add_argument(
        "reports",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folder of --fp8-report, or a report.json; the newest last",
    )
    add.add_argument("-o", "--output", type=Path, help="where to write (default: index.html in the last folder)")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and say where; gives the exit code 0. Raises :class:`Fp8Error`."""
    from pytest_fp8.report.page import render

    for folder in options.reports:
        for path in recover(folder):
            print(f"wrote {path}, of a session that has not ended")
    last: Path = options.reports[-1]
    target = options.output or (last if last.is_dir() else last.parent) / PAGE
    # A page is shown to others, whom the folders of this machine do not concern.
    text = render([(path.name or str(path), read_report(path)) for path in options.reports])
    try:
        if target.is_file() or not target.exists():
            # What a link leads to is written, and the link stays.
            write_atomically(target.resolve(), text)
        else:
            # A pipe or a device, such as /dev/stdout, would be gone if a file took its place.
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Fp8Error(
            R.NOT_WRITABLE, f"cannot write {target}: {error.strerror}", next_step="name a file with -o"
        ) from None
    print(f"wrote {target}")
    return 0


# -- what other tools read of a test ----------------------------------------------------------------------------------


def figures(row: Row) -> dict[str, float]:
    """The figures of a case that were measured: shares and ratios as numbers, the loss gap in nats."""
    found = {"fp8_share": ("layers", "fp8_share"), "loss_gap": ("loss", "gap"), "memory_ratio": ("memory", "ratio")}
    told = {name: number(row.decisions[q].numbers, key) for name, (q, key) in found.items() if q in row.decisions}
    if row.speed is not None:
        speed = row.speed.numbers
        told |= {"speedup": number(speed, "speedup"), "speedup_low": number(speed, "low")}
        told |= {"speedup_high": number(speed, "high"), "speedup_limit": number(speed, "account", "limit")}
    return {name: value for name, value in told.items() if value is not None}


def properties(case: str, verdict: str, asked: Mapping[str, Answer]) -> list[tuple[str, object]]:
    """Of a test, as JUnit files have them. ``asked``: what it was told, by question."""
    row = Row(case, decisions={question: each.decision for question, each in asked.items()})
    last = list(asked.values())[-1:]
    measured = [(name if name.startswith("fp8_") else f"fp8_{name}", round(v, 6)) for name, v in figures(row).items()]
    codes = [("fp8_code", each.code) for each in asked.values() if each.code][-1:]
    return [
        ("fp8_case", case),
        ("fp8_verdict", verdict),
        *codes,
        *(("fp8_headline", e.headline) for e in last),
        *measured,
    ]


def told_verdict(report: Any, asked: Mapping[str, Answer]) -> str:
    """The verdict of a test: of one that passed the worst of its answers, shown in place of PASSED; of one that failed
    as expected FAIL, or the missing answer that it failed with. ``report``: pytest's, of its call."""
    said = {each.verdict for each in asked.values()}
    if report.skipped and not hasattr(report, "wasxfail"):
        return "NOT_EXERCISED"
    if report.passed:
        return next((word for word in ("INVALID", "INCONCLUSIVE", "NOT_EXERCISED", "IMPROVED") if word in said), "PASS")
    return "FAIL" if report.failed else next((w for w in ("FAIL", "INVALID", "INCONCLUSIVE") if w in said), "FAIL")


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
