"""``pytest-fp8 baselines``: the sub-commands of a person who reviews baselines. Loads neither torch nor numpy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.errors import BaselineError

if TYPE_CHECKING:
    from pytest_fp8.case import Case

OK, WRONG, UNANSWERED = 0, 1, 2
"""Exit codes: nothing wrong; something got worse or is broken; the question could not be answered."""


def add_baselines(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    baselines = commands.add_parser("baselines", help="list, compare and check stored baselines")
    actions = baselines.add_subparsers(required=True, metavar="ACTION")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=Path("baselines"), help="folder of baselines (default: baselines)")
    common.add_argument("--gpu", default="", help="this GPU's alone, e.g. h200")
    suite = argparse.ArgumentParser(add_help=False)
    suite.add_argument(
        "--suite",
        type=Path,
        help="Python file whose attributes are the cases (default: suites/matrix.py beside the folder); it is run",
    )
    add = actions.add_parser("list", parents=[common], help="one line per baseline, or per session of a case's")
    add.add_argument("case", nargs="?", default="", metavar="CASE", help="its sessions: CASE or GPU/CASE")
    add.set_defaults(run=list_baselines)
    add = actions.add_parser(
        "diff", parents=[common, suite], help="what changed since a git revision; exit 1 where a metric got worse"
    )
    add.add_argument("--git", default="HEAD", metavar="REV", help="with the old ones (default: HEAD)")
    add.set_defaults(run=diff)
    add = actions.add_parser("check", parents=[common, suite], help="is every file sound, and of a case of the suite")
    add.set_defaults(run=check)


def list_baselines(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.record import Baseline
    from pytest_fp8.baselines.store import chosen, read_folder
    from pytest_fp8.report.baselines import print_list

    files = chosen(read_folder(options.dir), options.gpu, options.case)
    print_list([each for each in files.values() if isinstance(each, Baseline)], sessions=bool(options.case))
    broken = [error for error in files.values() if isinstance(error, BaselineError)]
    for error in broken:
        print(error.message, file=sys.stderr)
    return UNANSWERED if broken else OK


def diff(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.review import compare_histories
    from pytest_fp8.baselines.store import Folder, chosen, estimated, read_folder, readable
    from pytest_fp8.report.baselines import print_diff

    before = Folder(options.dir, options.git).all()
    now = {} if before and not options.dir.exists() else read_folder(options.dir)
    named = chosen({**before, **now}, options.gpu).keys()
    old, new = (readable({path: files[path] for path in named if path in files}) for files in (before, now))
    own = {case.id: case.tolerance for case in _cases(options) or ()} if options.suite else {}
    # Of the old side: what comes with a change must not widen the noise that it is judged by.
    components = {gpu: estimated(stored for (its, _), stored in old.items() if its == gpu) for gpu, _ in new}
    revisions = [
        compare_histories(old.get((gpu, case)), stored, own.get(case), components[gpu])
        for (gpu, case), stored in sorted(new.items())
    ]
    removed = [f"{gpu}/{case}" for gpu, case in sorted(old.keys() - new.keys())]
    print_diff(revisions, removed)
    return WRONG if removed or any(revision.worse for revision in revisions) else OK


def check(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.check import inspect
    from pytest_fp8.baselines.store import chosen, read_folder
    from pytest_fp8.report.baselines import print_notes

    files, cases = chosen(read_folder(options.dir), options.gpu), _cases(options)
    found = inspect(files, cases)
    print_notes(found)
    alone = "" if cases is not None else f", each looked at alone, for no {_suite_of(options)} lists cases (--suite)"
    errors = sum(note.error for note in found)
    print(f"{len(files)} baselines{alone}: {errors} error(s), {len(found) - errors} note(s)")
    return WRONG if errors else OK


def _cases(options: argparse.Namespace) -> list[Case] | None:
    """Those of the suite; ``None`` where none is named and no folder of suites lies beside the baselines: the cases are
    in a project's tests then, and no list says which files are of one, or what they are today."""
    from pytest_fp8.baselines.check import suite_cases

    suite = _suite_of(options)
    return suite_cases(suite) if options.suite is not None or suite.parent.exists() else None


def _suite_of(options: argparse.Namespace) -> Path:
    suite: Path | None = options.suite
    return suite or options.dir.absolute().parent / "suites" / "matrix.py"
