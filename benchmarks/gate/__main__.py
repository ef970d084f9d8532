"""What the gate catches, and what it leaves alone, beside the rules that people use today.

    python -m benchmarks.gate [--json FILE] [--quick]

A minute or two on two cores. Every rate comes with its number of trials; seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gate.noise import CONDITIONS, QUIET, Noise, autocorrelation, fit
from benchmarks.gate.recordings import histories, load
from benchmarks.gate.replay import Replayed, replay
from benchmarks.gate.rules import TODAY
from benchmarks.gate.simulate import (
    ALONE,
    BESIDE,
    BUILD_SECONDS,
    CHANGES,
    OURS,
    SHARED,
    Plan,
    Tally,
    run,
    wilson,
)
from pytest_fp8.report.table import new_table
from pytest_fp8.stats.components import Components, estimate

RULES = (OURS, *(rule.name for rule in TODAY))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every tally there")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sessions: a look, not a result")
    parser.add_argument("--tolerance", type=float, default=Plan.tolerance)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    options = parser.parse_args(arguments)
    share = 10 if options.quick else 1
    plan = Plan(
        seed=options.seed,
        healthy=Plan.healthy // share,
        disturbed=Plan.disturbed // share,
        changed=Plan.changed // share,
        tolerance=options.tolerance,
    )
    measured = histories()
    components = estimate(list(measured.values()), prior=None)
    noises = fit({case: found for case, found in load().items() if not case.endswith("-bf16")}, components)
    if not components.sessions or not any(noise.gpu_bound for noise in noises.values()):
        print("no recordings and baselines of two sessions of a GPU-bound case to fit noise to", file=sys.stderr)
        return 2
    started = time.monotonic()
    tallies = run(noises.values(), components, plan)
    replayed = replay(measured, plan.tolerance)
    console = Console(width=None if sys.stdout.isatty() else 132)
    print("\n".join(["The variance components, as fitted:", *component_lines(components), ""]))
    for table in (noise_table(noises), false_alarms(tallies), detection(tallies), young(tallies), cost(tallies)):
        console.print(table)
    console.print(replay_table(replayed))
    cases = sum(tally.cases for tally in tallies if tally.rule in (OURS, BESIDE))
    print(f"{cases} gated cases in {time.monotonic() - started:.0f} s")
    if options.json:
        content = {
            "plan": vars(plan),
            "components": vars(components),
            "noise": [described(noise) for noise in noises.values()],
            "tallies": [tally.to_json() for tally in tallies],
            "replay": [vars(one) for one in replayed],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def component_lines(components: Components) -> list[str]:
    parts = (("sessions", "session"), ("processes", "process"), ("blocks", "block"))
    return [
        f"  between {what}: {getattr(components, name):.2%}, {getattr(components, what)} degrees of freedom"
        for what, name in parts
    ]


def _table(title: str, *columns: str) -> Table:
    table = new_table(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    return table


def noise_table(noises: dict[str, Noise]) -> Table:
    columns = ("case", "BF16 ms", "FP8 ms", "between blocks", "neighbours' correlation", "from")
    table = _table("The recorded cases; the others' blocks come from stored baselines", *columns)
    for noise in noises.values():
        if noise.recorded:
            table.add_row(
                noise.case,
                f"{noise.bf16_ms:.1f}",
                f"{noise.fp8_ms:.1f}",
                f"{noise.sigma_block:.2%}",
                f"{autocorrelation(noise):+.2f}",
                f"{noise.residuals.shape[0]} x {noise.residuals.shape[1]} blocks",
            )
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


def replay_table(replayed: Sequence[Replayed]) -> Table:
    table = _table(
        "Replay: each repeated session of a case against those before it. Nothing is known to have changed; the "
        "components were estimated from these sessions, too",
        "case",
        "stored",
        "change",
        OURS,
    )
    for one in replayed:
        table.add_row(one.case, str(one.stored), f"{one.change:+.2%}", one.ours)
    return table


def described(noise: Noise) -> dict[str, object]:
    """The fit as plain data, without the residuals."""
    names = ("case", "bf16_ms", "fp8_ms", "sigma_block", "sigma_run", "recorded", "sources")
    return {name: getattr(noise, name) for name in names} | {"autocorrelation": autocorrelation(noise)}


if __name__ == "__main__":
    sys.exit(main())
