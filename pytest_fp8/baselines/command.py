"""``pytest-fp8 baselines``: the sub-commands of a person who reviews baselines. Loads neither torch nor numpy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, refuse

if TYPE_CHECKING:
    from pytest_fp8.case import Case

OK, WRONG, UNANSWERED = 0, 1, 2
"""Exit codes: nothing wrong; something got worse or is broken; the question could not be answered."""
DIR = Path("baselines")


def add_baselines(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    baselines = commands.add_parser("baselines", help="list, compare and check stored baselines")
    actions = baselines.add_subparsers(required=True, metavar="ACTION")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=DIR, help="folder of baselines (default: baselines)")
    common.add_argument("--gpu", default="", help="this GPU's alone, e.g. h200")
    common.add_argument("--json", action="store_true", help="JSON instead of tables")

    add = actions.add_parser("list", parents=[common], help="one line per baseline, or per session of a case's")
    add.add_argument("case", nargs="?", default="", metavar="CASE", help="its sessions: CASE or GPU/CASE")
    add.set_defaults(run=list_baselines)
    add = actions.add_parser("diff", parents=[common], help="what changed; exit 1 where a metric got worse")
    add.add_argument("a", nargs="?", type=Path, metavar="A", help="folder or file: the old ones (default: --dir)")
    add.add_argument("b", nargs="?", type=Path, metavar="B", help="folder or file: the new ones (default: --dir)")
    add.add_argument("--git", metavar="REV", help="take the old ones from this git revision of --dir")
    add.add_argument("--suite", type=Path, help="Python file with the cases, whose own tolerances count; it is run")
    add.set_defaults(run=diff)
    add = actions.add_parser("check", parents=[common], help="is every file sound, and of a case of the suite")
    add.add_argument(
        "--suite",
        type=Path,
        help="Python file whose attributes are the cases (default: suites/matrix.py beside the folder); it is run",
    )
    add.set_defaults(run=check)


def list_baselines(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.record import Baseline
    from pytest_fp8.baselines.store import gpus_in, named, read_folder, require_gpu
    from pytest_fp8.report.baselines import describe, print_list

    files = read_folder(options.dir)
    require_gpu(options.gpu, gpus_in(files))
    files = {path: stored for path, stored in files.items() if options.gpu in ("", path.parts[0])}
    files = named(options.case, files) if options.case else files
    stored = [each for each in files.values() if isinstance(each, Baseline)]
    if options.json:
        _print_json([each.to_json() if options.case else describe(each) for each in stored])
    else:
        print_list(stored, sessions=bool(options.case))
    broken = [error for error in files.values() if isinstance(error, BaselineError)]
    for error in broken:
        print(error.message, file=sys.stderr)
    return UNANSWERED if broken else OK


def diff(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines import store
    from pytest_fp8.baselines.review import compare_histories
    from pytest_fp8.baselines.store import read_folder, readable
    from pytest_fp8.report.baselines import print_diff, revision_to_json

    if (options.git is None) is (options.b is None):
        refuse(
            B.USAGE,
            "diff takes two sides",
            expected="A and B, or --git REV for the old side and A or --dir for the new one",
            seen="both" if options.b else "one" if options.a else "none",
            next_step="pytest-fp8 baselines diff --git main",
        )
    if options.git is not None:
        old = readable(store.read_all(store.Revision(options.dir, options.git)))
        gone = options.a is None and bool(old) and not options.dir.exists()
        new = {} if gone else readable(read_folder(options.a or options.dir))
    else:
        old, new = readable(read_folder(options.a)), readable(read_folder(options.b))
    store.require_gpu(options.gpu, {gpu for gpu, _ in {*old, *new}})
    wanted = sorted(key for key in set(old) | set(new) if options.gpu in ("", key[0]))
    own = {case.id: case.tolerance for case in _cases(options)} if options.suite else {}
    tolerances = {case: {"speedup": tolerance, "busy_speedup": tolerance} for case, tolerance in own.items()}
    known = {gpu: store.components_in(store.Folder(options.dir), gpu) for gpu in {gpu for gpu, _ in wanted}}
    revisions = [
        compare_histories(old.get(key), new[key], tolerances.get(key[1]), known[key[0]]) for key in wanted if key in new
    ]
    removed = not (options.b or options.a or options.dir).is_file()
    only_old = [f"{gpu}/{case}" for gpu, case in wanted if (gpu, case) not in new]
    if options.json:
        differences = [revision_to_json(revision) for revision in revisions]
        _print_json({"baselines": differences, "removed" if removed else "only in A": only_old})
    else:
        print_diff(revisions, only_old, removed)
    return WRONG if any(revision.worse for revision in revisions) or (removed and only_old) else OK


def check(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.check import inspect
    from pytest_fp8.baselines.store import Folder, components_in, gpus_in, read_folder, require_gpu
    from pytest_fp8.report.baselines import print_findings

    files = read_folder(options.dir)
    require_gpu(options.gpu, gpus_in(files))
    # Else the cases are in a project's tests: no list says which files are of one, or what they are today.
    listed = options.suite is not None or _suite_of(options).parent.exists()
    found = inspect(
        files,
        _cases(options) if listed else None,
        options.gpu,
        lambda gpu: components_in(Folder(options.dir), gpu),
    )
    errors = [finding for finding in found if finding.level == "error"]
    if options.json:
        _print_json([finding.to_json() for finding in found])
        return WRONG if errors else OK
    print_findings(errors, [finding for finding in found if finding.level != "error"])
    alone = "" if listed else f", each looked at alone, for no {_suite_of(options)} lists cases (--suite)"
    print(f"{len(files)} baselines{alone}: {len(errors)} error(s), {len(found) - len(errors)} note(s)")
    return WRONG if errors else OK


def _cases(options: argparse.Namespace) -> list[Case]:
    from pytest_fp8.baselines.check import suite_cases

    return suite_cases(_suite_of(options))


def _suite_of(options: argparse.Namespace) -> Path:
    suite: Path | None = options.suite
    return suite or options.dir.absolute().parent / "suites" / "matrix.py"


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True))
