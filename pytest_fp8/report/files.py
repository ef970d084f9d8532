"""The files of ``--fp8-report``."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.baselines.strict import quoted
from pytest_fp8.baselines.update import origin_of
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error, first_line
from pytest_fp8.plain import finite
from pytest_fp8.report.record import JOURNAL, Began, Record, read_journal

SCHEMA = 1
"""The number of what ``report.json`` holds; it grows where a field that readers use changes its meaning or goes.
``docs/report.schema.json`` describes it."""
LONGEST_ID = 2000
"""Characters of a test's name in a report."""
LONGEST_PROBLEM = 20_000
"""Characters of what makes a session fail, which may list files."""


def write_report(
    record: Record, folder: Path, origin: Mapping[str, Any], problems: Sequence[str] = (), finished: bool = True
) -> Path:
    """Write ``report.json``; gives its path. ``origin``: the provenance of this session's measurements. ``problems``:
    what makes the session fail beside its tests. ``finished``: whether the session is at its end, and all its FP8 tests
    came to theirs.

    Raises :class:`BaselineError`.
    """
    provenance = dict(origin)
    for first in list(record.entries.values())[:1]:
        provenance = origin_of(first, origin)
    told = record.to_json()
    open_tests = told["open_tests"]
    report = {
        "schema": SCHEMA,
        **told,
        "failed_tests": _cut(told["failed_tests"], LONGEST_ID),
        "open_tests": {case: _cut(tests, LONGEST_ID) for case, tests in open_tests.items()},
        "finished": finished,
        "problems": _cut(problems, LONGEST_PROBLEM),
        "provenance": provenance,
    }
    path = folder / "report.json"
    write_atomically(path, json.dumps(finite(report), indent=1, default=str, allow_nan=False) + "\n")
    return path


def _cut(texts: Iterable[str], longest: int) -> list[str]:
    """Texts as long as the schema takes them."""
    return [text if len(text) <= longest else f"{text[: longest - 3]}..." for text in texts]


def write_beside(report: Path, environment: Mapping[str, str]) -> tuple[list[Path], list[str]]:
    """What people and other tools read, beside ``report.json``. Gives the paths, and notes on what could not be
    written, which fails no session. The summary also goes where GitHub shows it; the page needs the extra ``report``.
    """
    from pytest_fp8.report.page import write as page
    from pytest_fp8.report.summary import NAME, markdown

    content = json.loads(report.read_text())
    summary = markdown(content)
    written = {report.with_name(NAME): summary}
    notes = _to_github(summary, environment.get("GITHUB_STEP_SUMMARY", ""))
    try:
        for path, text in written.items():
            write_atomically(path, text)
        shown = bool(content["entries"]) and not page.missing()
        if shown:
            page.write_page([report], report.with_name(page.NAME))
        elif content["entries"]:
            notes.append(f"no page was written, which needs {' and '.join(page.missing())}: {page.INSTALL}")
    except Exception as error:
        # Drawing runs much code that is not ours: a gate must not fail because a font is missing.
        note = f"not all of the report was written: {first_line(_reason(error), 300)}"
        return [path for path in written if path.exists()], [*notes, note]
    return [*written, *([report.with_name(page.NAME)] if shown else [])], notes


def _reason(error: Exception) -> str:
    """Why something was not written. Of what nobody foresaw also the class: ``KeyError: 'font'`` says more than
    ``'font'``."""
    if isinstance(error, Fp8Error):
        return error.headline
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def _to_github(summary: str, file: str) -> list[str]:
    """Append the summary to the file that GitHub shows, where there is one; gives a note where that fails."""
    try:
        if file:
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(summary)
    except OSError as error:
        return [f"the summary was not added to GITHUB_STEP_SUMMARY={file}: {error.strerror}"]
    return []


def recover(folder: Path) -> list[Path]:
    """Write ``report.json`` from the journal of a session that was killed or still runs; gives the report's path, or
    nothing without a journal. Raises :class:`Fp8Error`."""
    from pytest_fp8.baselines.strict import Unsound
    from pytest_fp8.report.reading import MOST_BYTES

    journal = folder / JOURNAL
    if not journal.exists():
        return []
    try:
        record = read_journal(journal, MOST_BYTES)
        began = next(line for line in record.lines if isinstance(line, Began))
    except (OSError, ValueError, TypeError, Unsound, StopIteration) as error:
        raise Fp8Error(
            R.NOT_A_REPORT,
            f"{quoted(str(journal))} is no journal of this pytest-fp8: {type(error).__name__}: {error}"[:500],
            next_step=f"remove it to read the report beside it: rm {shlex.quote(str(journal))}",
        ) from None
    return [write_report(record, folder, began.provenance, finished=False)]


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
    from pytest_fp8.report.page.write import NAME, write_page

    for folder in options.reports:
        for path in recover(folder):
            print(f"wrote {path}, of a session that has not ended")
    last: Path = options.reports[-1]
    target = options.output or (last if last.is_dir() else last.parent) / NAME
    if target.is_dir():
        again = ["pytest-fp8", "report", *map(str, options.reports), "-o", str(target / NAME)]
        raise Fp8Error(
            R.NOT_WRITABLE,
            f"could not write {target}: it is a folder",
            expected="the name of a file",
            seen=f"{'-o ' if options.output else ''}{target}, a folder",
            cause="the page is one file, and -o names that file",
            next_step=shlex.join(again),
        )
    write_page(options.reports, target)
    print(f"wrote {target}")
    return 0


def holds_report(folder: Path) -> bool:
    """Whether a session has left its report there: ``report.json`` is one of ours."""
    from pytest_fp8.baselines.strict import Unsound, parse, read_regular
    from pytest_fp8.report.reading import MOST_BYTES

    try:
        found = parse(read_regular(folder / "report.json", MOST_BYTES))
    except (Unsound, OSError):
        return False
    return isinstance(found, dict) and found.keys() >= {"schema", "entries", "provenance"}


def remove_report(folder: Path) -> None:
    """Remove what lies beside a session's report in a folder, where one is; the next takes the place of the report.
    Files of others stay."""
    from pytest_fp8.report.page.write import NAME as PAGE
    from pytest_fp8.report.summary import NAME as SUMMARY

    if not holds_report(folder):
        return
    for name in (SUMMARY, PAGE):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
