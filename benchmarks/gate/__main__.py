"""What the gate catches, and what it leaves alone, beside the rules that people use today.

    python -m benchmarks.gate [--seed 3] [--tolerance 0.02]

A minute or two on two cores. Every rate comes with its number of trials; seeds are fixed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.gate.noise import CONDITIONS, QUIET, fit
from benchmarks.gate.recordings import histories, load
from benchmarks.gate.simulate import (
    ALONE,
    BESIDE,
    BUILD_SECONDS,
    CHANGES,
    OURS,
    SHARED,
    TODAY,
    Plan,
    Tally,
    replay,
    run,
    wilson,
)
from pytest_fp8.report.table import new_table
from pytest_fp8.stats.components import estimate

RULES = (OURS, *TODAY)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=Plan.tolerance)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    options = parser.parse_args(arguments)
    started, measured = time.monotonic(), histories()
    plan, components = Plan(seed=options.seed, tolerance=options.tolerance), estimate(list(measured.values()), None)
    noises = fit({case: found for case, found in load().items() if not case.endswith("-bf16")}, components)
    tallies = run(noises.values(), components, plan)
    print("The variance components, as fitted:")
    for what, name in (("sessions", "session"), ("processes", "process"), ("blocks", "block")):
        print(f"  between {what}: {getattr(components, name):.2%}, {getattr(components, what)} degrees of freedom")
    console = Console(width=None if sys.stdout.isatty() else 132)
    for table in (false_alarms(tallies), detection(tallies), young(tallies), cost(tallies)):
        console.print(table)
    console.print(replay_table(replay(measured, plan.tolerance)))
    cases = sum(tally.cases for tally in tallies if tally.rule in (OURS, BESIDE))
    print(f"{cases} gated cases in {time.monotonic() - started:.0f} s")
    return 0


def _table(title: str, *columns: str) -> Table:
    table = new_table(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    return table


def _of(tallies: Sequence[Tally], rule: str, **cell: object) -> Tally:
    """The tally of a rule in the cell that the tables speak of unless they say otherwise."""
    wanted = {"condition": QUIET.name, "change": 0.0, "stored": 4, "shared": SHARED, **cell}
    return next(t for t in tallies if t.rule == rule and all(getattr(t, k) == v for k, v in wanted.items()))


def _alarms(tally: Tally) -> str:
    low, high = wilson(tally.alarmed, tally.sessions)
    return f"{tally.alarmed / tally.sessions:.1%} [{low:.1%}, {high:.1%}]"


def _caught(tally: Tally) -> str:
    low, high = tally.caught()
    return f"{tally.rate('FAIL'):.0%} [{low:.0%}, {high:.0%}]"


def false_alarms(tallies: Sequence[Tally]) -> Table:
    sessions = _of(tallies, OURS).sessions
    table = _table(
        f"Sessions of 30 unchanged cases in which one fails, four sessions stored ({sessions} sessions on a quiet "
        f"machine, {_of(tallies, OURS, condition=CONDITIONS[1].name).sessions} elsewhere; [95 % interval])",
        "rule",
        "quiet, sessions' part each case's own",
        "half of it shared",
        "all of it shared",
        *(condition.name for condition in CONDITIONS[1:]),
    )
    for rule in RULES:
        quiet = [_alarms(_of(tallies, rule, shared=shared)) for shared in (0.0, SHARED, 1.0)]
        table.add_row(
            rule, *quiet, *(_alarms(_of(tallies, rule, condition=condition.name)) for condition in CONDITIONS[1:])
        )
    beside = next(t for t in tallies if t.rule == BESIDE and not t.change)
    table.add_row(BESIDE, _alarms(beside), *("-" for _ in range(len(CONDITIONS) + 1)))
    return table


def detection(tallies: Sequence[Tally]) -> Table:
    cases = _of(tallies, OURS, change=CHANGES[0]).cases
    table = _table(
        f"Share of slower cases that fail, four sessions stored ({cases} cases a cell; [95 % interval])",
        "rule",
        *(f"{change:.0%}" for change in CHANGES),
    )
    for rule in RULES:
        table.add_row(rule, *(_caught(_of(tallies, rule, change=change)) for change in CHANGES))
    for rule in (BESIDE, ALONE):
        beside = next(t for t in tallies if t.rule == rule and t.change)
        table.add_row(rule, _caught(beside), *("-" for _ in CHANGES[1:]))
    return table


def young(tallies: Sequence[Tally]) -> Table:
    table = _table(
        f"{OURS} by the number of stored sessions",
        "stored",
        "false alarms a session",
        "undecided, no change",
        "-2% fails",
        "-2% undecided",
        "-3% fails",
        "-3% undecided",
    )
    for stored in (1, 2, 4, 8):
        quiet, two, three = (_of(tallies, OURS, stored=stored, change=change) for change in (0.0, -0.02, -0.03))
        cells = [f"{tally.rate('INCONCLUSIVE'):.1%}" for tally in (quiet, two, three)]
        table.add_row(str(stored), _alarms(quiet), cells[0], _caught(two), cells[1], _caught(three), cells[2])
    return table


def cost(tallies: Sequence[Tally]) -> Table:
    table = _table(
        f"GPU time a case: seconds in steps, and in builds at {BUILD_SECONDS:.0f} s a pair of arms",
        "rule",
        "pairs of processes",
        "steps",
        "builds",
        "together",
    )
    beside = [t for t in tallies if t.rule == BESIDE]
    rows = [
        (f"{OURS}, no change", _of(tallies, OURS)),
        (f"{OURS}, -3%", _of(tallies, OURS, change=-0.03)),
        *((f"{BESIDE}, {'-1%' if t.change else 'no change'}", t) for t in beside),
    ]
    for name, tally in rows:
        builds, steps = tally.builds / tally.cases, tally.gpu_seconds / tally.cases
        whole = steps + builds * BUILD_SECONDS
        table.add_row(name, f"{builds:.2f}", f"{steps:.0f} s", f"{builds * BUILD_SECONDS:.0f} s", f"{whole:.0f} s")
    return table


def replay_table(replayed: Sequence[tuple[str, int, float, str]]) -> Table:
    table = _table(
        "Replay: each repeated session of a case against those before it. Nothing is known to have changed; the "
        "components were estimated from these sessions, too",
        "case",
        "stored",
        "change",
        OURS,
    )
    for case, stored, change, verdict in replayed:
        table.add_row(case, str(stored), f"{change:+.2%}", verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
