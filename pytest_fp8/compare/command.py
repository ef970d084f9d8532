"""``pytest-fp8 compare``: the arguments and the table of the comparison in one session."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import S
from pytest_fp8.errors import refuse
from pytest_fp8.suites_command import suites

if TYPE_CHECKING:
    from pytest_fp8.case import Case
    from pytest_fp8.compare.session import Comparison

COLUMNS = ("case", "arm", "base", "head", "head against base", "verdict")
DESCRIPTION = """\
Compare two commits on one GPU: their arms alternate, no stored baseline is needed. The project is
the current folder; it and its src/ come first on each arm's import path. Exit 0: not slower; 1: slower, or FP8 does not
run as it should; 2: no answer, also where the verdict is INVALID or INCONCLUSIVE.
"""


def add_compare(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("compare", help="base against head on one GPU", description=DESCRIPTION)
    for side in ("base", "head"):
        what = f"commit of the project in {side}'s arms"
        add.add_argument(f"--{side}-git", metavar="REV", required=side == "base", help=what)
    add.add_argument("--case", action="append", required=True, help="a case of the suite; may be repeated")
    add.add_argument(
        "--suite",
        type=Path,
        help="file that lists the cases (default: suites/matrix.py, here or of this package)",
    )
    add.add_argument("--workload", default="", metavar="MODULE:NAME", help="your own model; its cases are own-...")
    add.add_argument("--tolerance", type=float, help="loss of speed that fails (default: 0.01)")
    add.add_argument("--fp8-only", action="store_true", help="leave the BF16 arms out")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and give the exit code."""
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.compare.session import Model, compare, environments, require_gpu
    from pytest_fp8.shipping import ship
    from pytest_fp8.verdicts import Verdict
    from pytest_fp8.workload import WorkloadReference

    _require_two(options)
    if options.tolerance is not None and not 0 < options.tolerance < 1:
        refuse(S.COMPARE_OPTIONS, "--tolerance", expected="a fraction between 0 and 1", seen=str(options.tolerance))
    workload = WorkloadReference(options.workload) if options.workload else None
    cases = named_cases(options.case, options.suite or _suite(), own=workload is not None)
    gpu = require_gpu(cases)
    model = Model(ship(workload, f"the workload {workload.text!r}"), workload.text) if workload is not None else Model()
    done: list[Comparison] = []
    with ExitStack() as held:
        sides = environments(options.base_git, options.head_git or "", Path.cwd(), held)
        # What was measured before an arm dies is not lost.
        held.callback(print_comparisons, done)
        for case in cases:
            pool = ArmPool(gpu)
            with closing(pool):
                done.append(compare(pool, case, model, sides, options.tolerance, with_bf16=not options.fp8_only))
    verdicts = {comparison.decision.verdict for comparison in done}
    if Verdict.FAIL in verdicts:
        return 1
    # A disturbed or an undecided comparison is no green one.
    return 2 if verdicts & {Verdict.INCONCLUSIVE, Verdict.INVALID} else 0


def _require_two(options: argparse.Namespace) -> None:
    """Raise :class:`SettingsError` unless base and head are two, with a model that both have."""
    if "" in (options.base_git, options.head_git):
        refuse(
            S.COMPARE_OPTIONS,
            "compare needs two sides",
            expected="--base-git REV; --head-git REV where head is not what is here",
            seen="one is given and empty: a variable that nobody has set?",
        )
    if not (options.workload or Path("pytest_fp8/compare").is_dir()):
        refuse(
            S.SAME_SIDES,
            "both sides would be the same: models of the suite are pytest-fp8's own, in every commit of this project",
            expected="your own model",
            seen=f"--case {options.case[0]} on two commits",
        )


def _suite() -> Path:
    here = Path("suites/matrix.py")
    return here if here.is_file() else suites() / "matrix.py"


def named_cases(names: Sequence[str], suite: Path, own: bool) -> list[Case]:
    """The cases of those ids: of the suite, or of the user's own model. Raises :class:`SettingsError`."""
    from pytest_fp8.baselines.check import suite_cases
    from pytest_fp8.case import OWN, Case
    from pytest_fp8.recipes import types

    if own:
        known = [Case(OWN, k.name, facts.name) for k in types() if not k.brings_model for facts in k.recipes]
    else:
        known = suite_cases(suite)
    by_id = {case.id: case for case in known}
    unknown = [name for name in names if name not in by_id]
    if unknown:
        refuse(
            S.COMPARE_OPTIONS,
            f"no case {unknown[0]!r}" + ("" if own else f" in {suite}"),
            expected=", ".join(by_id),
            seen=unknown[0],
            next_step="" if own else "another file: --suite; a model of your own: --workload package.module:name",
        )
    return [by_id[name] for name in names]


def print_comparisons(done: Sequence[Comparison]) -> None:
    """A row per arm, then each verdict in full."""
    from pytest_fp8.report.table import print_table

    rows = []
    for comparison in done:
        for arm, side in (("fp8", comparison.fp8), ("bf16", comparison.bf16)):
            if side is None:
                continue
            low, high = side.estimate.change_interval
            verdict = comparison.decision.verdict.value if arm == "fp8" else "-"
            times = [f"{comparison.step_ms[f'{name} {arm}']:.2f} ms" for name in ("base", "head")]
            change = f"{side.estimate.change:+.2%} [{low:+.2%}, {high:+.2%}]"
            rows.append((comparison.case, arm, *times, change, verdict))
    if rows:
        print_table(COLUMNS, rows)
    for comparison in done:
        print(f"{comparison.case}: {comparison.decision.message}")
