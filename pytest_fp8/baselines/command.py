"""``pytest-fp8 baselines``: the sub-commands of a person who reviews baselines. Loads neither torch nor numpy."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError, SettingsError, refuse

if TYPE_CHECKING:
    from pytest_fp8.case import Case

OK, WRONG, UNANSWERED = 0, 1, 2
"""Exit codes: nothing wrong; something got worse or is broken; the question could not be answered."""
DIR = Path("baselines")
MAX_AGE = 180
"""Days after which a baseline is noted as stale: about two releases of torch."""


class _Named(argparse.Action):
    """Not empty: a variable that is not set would be taken for all GPUs."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if not values:
            parser.error(f"{option_string} is given and empty; leave it out for all GPUs, or name one, e.g. h200")
        setattr(namespace, self.dest, values)


def add_baselines(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    baselines = commands.add_parser("baselines", help="list, show, compare and check stored baselines")
    actions = baselines.add_subparsers(required=True, metavar="ACTION")

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=DIR, help="folder of baselines (default: baselines)")
    common.add_argument("--gpu", action=_Named, default="", help="this GPU's alone, e.g. h200")
    common.add_argument("--json", action="store_true", help="JSON instead of tables")
    suite = argparse.ArgumentParser(add_help=False)
    suite.add_argument(
        "--suite",
        type=Path,
        help="Python file whose attributes are the cases (default: suites/matrix.py beside the folder); it is run",
    )

    add = actions.add_parser("list", parents=[common], help="one line per baseline")
    add.set_defaults(run=list_baselines)
    add = actions.add_parser("show", parents=[common], help="all that one baseline holds")
    add.add_argument("case")
    add.set_defaults(run=show)
    add = actions.add_parser("diff", parents=[common], help="what changed; exit 1 where a metric got worse")
    add.add_argument("a", nargs="?", type=Path, metavar="A", help="folder or file: the old ones (default: --dir)")
    add.add_argument("b", nargs="?", type=Path, metavar="B", help="folder or file: the new ones (default: --dir)")
    add.add_argument("--git", metavar="REV", help="take the old ones from this git revision of --dir")
    add.add_argument("--suite", type=Path, help="Python file with the cases, whose own tolerances count; it is run")
    add.set_defaults(run=diff)
    add = actions.add_parser("check", parents=[common, suite], help="is every file sound, and of a case of the suite")
    add.add_argument(
        "--max-age", type=int, default=MAX_AGE, metavar="DAYS", help=f"note older ones (default {MAX_AGE})"
    )
    add.set_defaults(run=check)
    add = actions.add_parser("prune", parents=[common, suite], help="baselines of no case of the suite")
    add.add_argument("--yes", action="store_true", help="delete them; without it they are listed")
    add.set_defaults(run=prune)
    add = actions.add_parser("promote", parents=[common], help="store reviewed candidates as baselines")
    add.add_argument("candidates", type=Path, help="folder or file, e.g. .fp8-report/candidates")
    add.add_argument("--case", action="append", default=[], help="this one alone; may be repeated")
    add.add_argument("--reason", required=True, help="why the baselines change; stored with them")
    add.set_defaults(run=promote)


def list_baselines(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.folder import gpus_in, read_folder, require_gpu
    from pytest_fp8.baselines.record import Baseline
    from pytest_fp8.report.baselines import describe, print_list

    files = read_folder(options.dir)
    require_gpu(options.gpu, gpus_in(files))
    stored = [b for b in files.values() if isinstance(b, Baseline) and options.gpu in ("", b.gpu)]
    broken = [error for error in files.values() if isinstance(error, BaselineError)]
    if options.json:
        _print_json([describe(baseline) for baseline in stored])
    else:
        print_list(stored)
    for error in broken:
        print(error.message, file=sys.stderr)
    return UNANSWERED if broken else OK


def show(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.folder import named, read_folder
    from pytest_fp8.report.baselines import show_lines

    # A single file lies in no folder of its GPU.
    files = {
        (path.parent.name or getattr(stored, "gpu", ""), path.stem): stored
        for path, stored in read_folder(options.dir).items()
    }
    wanted = named(options.case, files, options.gpu)
    chosen = [stored for name, stored in files.items() if name in wanted]
    sound = [stored for stored in chosen if not isinstance(stored, BaselineError)]
    if options.json and len(chosen) > 1:
        gpus = sorted(gpu for gpu, _ in wanted)
        refuse(
            B.USAGE,
            f"{options.case} is stored for {len(gpus)} GPUs",
            expected="one baseline, for --json",
            seen=", ".join(gpus),
            next_step=f"--gpu {gpus[0]}",
        )
    for stored in sound:
        if options.json:
            _print_json(stored.to_json())
        else:
            print("\n".join(show_lines(stored)))
    for error in chosen:
        if isinstance(error, BaselineError):
            raise error
    return OK


def diff(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.folder import read_folder, read_revision, readable, require_gpu
    from pytest_fp8.baselines.review import compare_histories
    from pytest_fp8.baselines.source import Folder
    from pytest_fp8.baselines.update import CANDIDATES
    from pytest_fp8.baselines.variance import components_in
    from pytest_fp8.report.baselines import print_diff, revision_to_json

    if options.git is None and options.b is None:
        raise SettingsError(
            B.USAGE,
            "diff needs two sides",
            expected="A and B, or --git REV for the old side",
            seen="one" if options.a else "none",
            next_step="pytest-fp8 baselines diff baselines .fp8-report/candidates",
        )
    if options.git is not None and options.b is not None:
        raise SettingsError(
            B.USAGE, "diff --git REV takes one folder", expected="the new side, or none for --dir", seen="two"
        )
    if options.git is not None:
        old = readable(read_revision(options.dir, options.git))
        gone = options.a is None and bool(old) and not options.dir.exists()
        new = {} if gone else readable(read_folder(options.a or options.dir))
    else:
        old, new = readable(read_folder(options.a)), readable(read_folder(options.b))
    require_gpu(options.gpu, {gpu for gpu, _ in {*old, *new}})
    wanted = sorted(key for key in set(old) | set(new) if options.gpu in ("", key[0]))
    own = {case.id: case.tolerance for case in _cases(options)} if options.suite else {}
    tolerances = {case: {"speedup": tolerance, "busy_speedup": tolerance} for case, tolerance in own.items()}
    side = options.b or options.a or options.dir
    candidates = CANDIDATES in side.absolute().parts[-3:]
    revisions = [
        compare_histories(
            old.get(key),
            new[key],
            tolerances.get(key[1]),
            candidates,
            components_in(Folder(options.dir), key[0]),
        )
        for key in wanted
        if key in new
    ]
    # A run's candidates are of the cases that it measured.
    removed = not side.is_file() and side.name != CANDIDATES
    only_old = [f"{gpu}/{case}" for gpu, case in wanted if (gpu, case) not in new]
    if options.json:
        differences = [revision_to_json(revision) for revision in revisions]
        _print_json({"baselines": differences, "removed" if removed else "only in A": only_old})
    else:
        print_diff(revisions, only_old, removed)
    return WRONG if any(revision.worse for revision in revisions) or (removed and only_old) else OK


def check(options: argparse.Namespace) -> int:
    import datetime

    from pytest_fp8.baselines.check import inspect
    from pytest_fp8.baselines.folder import gpus_in, of_all_gpus, read_folder, require_gpu
    from pytest_fp8.baselines.source import Folder
    from pytest_fp8.baselines.variance import components_in
    from pytest_fp8.libraries import library_versions
    from pytest_fp8.report.baselines import print_findings

    one_file = options.dir.is_file()
    files, options.dir = of_all_gpus(read_folder(options.dir), options.dir)
    require_gpu(options.gpu, gpus_in(files))
    alone = bool(files) and options.suite is None and not _suite_of(options).parent.exists()
    cases = [] if alone else _cases(options)
    today = datetime.datetime.now(datetime.UTC).date()
    found = inspect(
        files,
        cases,
        today=today,
        max_age=options.max_age,
        installed={"python": platform.python_version(), **library_versions()},
        gpu=options.gpu,
        components=lambda gpu: components_in(Folder(options.dir), gpu),
    )
    if alone:
        # The cases are in a project's tests: no list says which files are of one, or what they are today.
        found = [finding for finding in found if finding.code not in (B.ORPHANED, B.OWN_MODEL)]
    if one_file:
        # Which other files there are is not asked.
        found = [finding for finding in found if finding.code is not B.UNEXERCISED]
    errors = [finding for finding in found if finding.level == "error"]
    if options.json:
        _print_json([finding.to_json() for finding in found])
        return WRONG if errors else OK
    print_findings(errors, [finding for finding in found if finding.level != "error"])
    of = f"each looked at alone, for no {_suite_of(options)} lists cases (--suite)" if alone else f"{len(cases)} cases"
    print(f"{len(files)} baselines, {of}: {len(errors)} error(s), {len(found) - len(errors)} note(s)")
    return WRONG if errors else OK


def prune(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.atomic import updating
    from pytest_fp8.baselines.check import orphaned
    from pytest_fp8.baselines.folder import gpus_in, of_all_gpus, read_folder, require_gpu

    again = _same_again(options, "prune", "--yes")
    files, options.dir = of_all_gpus(read_folder(options.dir), options.dir)
    if options.dir.is_relative_to(Path.cwd()):
        options.dir = options.dir.relative_to(Path.cwd())
    require_gpu(options.gpu, gpus_in(files))
    cases = _cases(options)
    gone: list[Path] = []
    for gpu in sorted(gpus_in(files)):
        if options.gpu in ("", gpu):
            names = [path.stem for path in files if path.parts[:-1] == (gpu,)]
            gone += [options.dir / gpu / f"{name}.json" for name in orphaned(names, cases, gpu)]
    if options.yes and gone:
        with updating(options.dir):
            for path in gone:
                path.unlink(missing_ok=True)
    if options.json:
        _print_json({"orphaned": [str(path) for path in gone], "deleted": options.yes})
        return OK
    for path in gone:
        print(f"{'deleted' if options.yes else 'orphaned'} {path}")
    if not gone:
        print("no orphaned baselines")
    elif not options.yes:
        print(f"next: {again} deletes them")
    return OK


def _same_again(options: argparse.Namespace, action: str, *more: str) -> str:
    """The command that does what this one does, and ``more``."""
    given = [(f"--{name}", getattr(options, name)) for name in ("dir", "gpu", "suite")]
    chosen = [word for flag, value in given if value and value != DIR for word in (flag, str(value))]
    return shlex.join(["pytest-fp8", "baselines", action, *chosen, *more])


def promote(options: argparse.Namespace) -> int:
    from pytest_fp8.baselines.update import promote_candidates
    from pytest_fp8.report.baselines import revision_lines

    done = promote_candidates(options.candidates, options.dir, options.reason, options.case, options.gpu)
    if options.json:
        _print_json({"written": [str(path) for path in done.written], "refused": done.problems})
    else:
        for revision in done.revisions:
            print("\n".join(revision_lines(revision)))
        for path in done.written:
            print(f"wrote {path}")
        for line in done.problems:
            print(line, file=sys.stderr)
    return WRONG if done.problems else OK


def _cases(options: argparse.Namespace) -> list[Case]:
    from pytest_fp8.baselines.check import suite_cases

    return suite_cases(_suite_of(options))


def _suite_of(options: argparse.Namespace) -> Path:
    named: Path | None = options.suite
    return named or options.dir.absolute().parent / "suites" / "matrix.py"


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True))
