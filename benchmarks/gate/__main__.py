"""What the gate catches, and what it leaves alone, beside the rules that people use today.

    python -m benchmarks.gate [--seed 3] [--tolerance 0.02]

A minute or two on two cores. Every rate comes with its number of trials; seeds are fixed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.gate.recordings import histories, load
from benchmarks.gate.simulate import (
    ALONE,
    BESIDE,
    BUILD_SECONDS,
    CHANGES,
    CONDITIONS,
    OURS,
    QUIET,
    SHARED,
    TODAY,
    Plan,
    Tally,
    fit,
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
    tallies = run(fit(load(), components).values(), components, plan)
    print("The variance components, as fitted:")
    for what, name in (("sessions", "session"), ("processes", "process"), ("blocks", "block")):
        print(f"  between {what}: {getattr(components, name):.2%}, {getattr(components, what)} degrees of freedom")
    console = Console(width=None if sys.stdout.isatty() else 132)
    for table in (false_alarms(tallies), detection(tallies), young(tallies), cost(tallies)):
        console.print(table)
    replayed = (
        (case, str(stored), f"{change:+.2%}", verdict)
        for case, stored, change, verdict in replay(measured, plan.tolerance)
    )
    title = (
        "Replay: each repeated session of a case against those before it. Nothing is known to have changed; the "
        "components were estimated from these sessions, too"
    )
    console.print(_table(title, ("case", "stored", "change", OURS), replayed))
    cases = sum(tally.cases for tally in tallies if tally.rule in (OURS, BESIDE))
    print(f"{cases} gated cases in {time.monotonic() - started:.0f} s")
    return 0


def _table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = new_table(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table


def _of(tallies: Sequence[Tally], rule: str, **cell: object) -> Tally:
    """The first tally of a rule in the cell that the tables speak of unless they say otherwise."""
    wanted = {"condition": QUIET, "change": 0.0, "stored": 4, "shared": SHARED, **cell}
    return next(t for t in tallies if t.rule == rule and all(getattr(t.job, k) == v for k, v in wanted.items()))


def _alarms(tally: Tally) -> str:
    """Sessions in which a case failed."""
    alarmed, sessions = sum(count > 0 for count in tally.failed), len(tally.failed)
    low, high = wilson(alarmed, sessions)
    return f"{alarmed / sessions:.1%} [{low:.1%}, {high:.1%}]"


def _caught(tally: Tally) -> str:
    low, high = tally.caught()
    return f"{tally.rate('FAIL'):.0%} [{low:.0%}, {high:.0%}]"


def false_alarms(tallies: Sequence[Tally]) -> Table:
    quiet, disturbed = [{"shared": shared} for shared in (0.0, SHARED, 1.0)], CONDITIONS[1:]
    cells = [*quiet, *({"condition": condition} for condition in disturbed)]
    rows = [[rule, *(_alarms(_of(tallies, rule, **cell)) for cell in cells)] for rule in RULES]
    rows.append([BESIDE, _alarms(_of(tallies, BESIDE)), *("-" for _ in cells[1:])])
    sessions, elsewhere = (len(_of(tallies, OURS, condition=each).failed) for each in CONDITIONS[:2])
    return _table(
        f"Sessions of 30 unchanged cases in which one fails, four sessions stored ({sessions} sessions on a quiet "
        f"machine, {elsewhere} elsewhere; [95 % interval])",
        (
            "rule",
            "quiet, sessions' part each case's own",
            "half of it shared",
            "all of it shared",
            *(condition.name for condition in disturbed),
        ),
        rows,
    )


def detection(tallies: Sequence[Tally]) -> Table:
    rows = [[rule, *(_caught(_of(tallies, rule, change=change)) for change in CHANGES)] for rule in RULES]
    for rule in (BESIDE, ALONE):
        rows.append([rule, _caught(_of(tallies, rule, change=CHANGES[0])), *("-" for _ in CHANGES[1:])])
    cases = _of(tallies, OURS, change=CHANGES[0]).cases
    title = f"Share of slower cases that fail, four sessions stored ({cases} cases a cell; [95 % interval])"
    return _table(title, ("rule", *(f"{change:.0%}" for change in CHANGES)), rows)


def young(tallies: Sequence[Tally]) -> Table:
    rows = []
    for stored in (1, 2, 4, 8):
        found = [_of(tallies, OURS, stored=stored, change=change) for change in (0.0, -0.02, -0.03)]
        shares = [[_caught(tally), f"{tally.rate('INCONCLUSIVE'):.1%}"] for tally in found]
        rows.append([str(stored), _alarms(found[0]), shares[0][1], *shares[1], *shares[2]])
    columns = ("-2% fails", "-2% undecided", "-3% fails", "-3% undecided")
    return _table(
        f"{OURS} by the number of stored sessions",
        ("stored", "false alarms a session", "undecided, no change", *columns),
        rows,
    )


def cost(tallies: Sequence[Tally]) -> Table:
    rows = []
    for rule, change in ((OURS, 0.0), (OURS, -0.03), (BESIDE, 0.0), (BESIDE, -0.01)):
        tally = _of(tallies, rule, change=change)
        pairs, steps = tally.builds / tally.cases, tally.gpu_seconds / tally.cases
        builds = pairs * BUILD_SECONDS
        name = f"{rule}, {f'{change:.0%}' if change else 'no change'}"
        rows.append([name, f"{pairs:.2f}", f"{steps:.0f} s", f"{builds:.0f} s", f"{steps + builds:.0f} s"])
    return _table(
        f"GPU time a case: seconds in steps, and in builds at {BUILD_SECONDS:.0f} s a pair of arms",
        ("rule", "pairs of processes", "steps", "builds", "together"),
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
