"""What the gate catches, and what it leaves alone, beside the rules that people use today.

    python -m benchmarks.gate [--json FILE] [--quick]

Minutes on two cores. Every rate comes with its number of trials; seeds are fixed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.gate.noise import CONDITIONS, QUIET, Noise, assumed_launch_bound, autocorrelation, fit
from benchmarks.gate.reach import BASELINE_PROCESSES, CAUGHT, NOISE, RUN_PROCESSES, caught
from benchmarks.gate.recordings import load
from benchmarks.gate.rules import TODAY
from benchmarks.gate.simulate import CHANGES, OURS, SESSION, Plan, Tally, per_session, run, together, wilson
from pytest_fp8.report.tables import new_table
from pytest_fp8.rules.speed import BASELINE_BLOCKS, LOOKS

BUILD_SECONDS = 25.0
"""Wall clock to build, compile and warm up both arms, where no recording says it: seen at 1B and 8B on an H200."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every tally there")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the trials: a look, not a result")
    parser.add_argument("--processes", type=int, default=Plan.processes, help="processes of a baseline")
    parser.add_argument("--tolerance", type=float, default=Plan.tolerance)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    options = parser.parse_args(arguments)
    share = 20 if options.quick else 1
    plan = Plan(
        seed=options.seed,
        healthy=Plan.healthy // share,
        changed=Plan.changed // share,
        tolerance=options.tolerance,
        processes=options.processes,
    )
    noises = fit({case: measured for case, measured in load().items() if not case.endswith("-bf16")})
    if not any(noise.gpu_bound for noise in noises.values()):
        print("no recordings and no baselines of a GPU-bound case to fit noise to", file=sys.stderr)
        return 2
    if all(noise.gpu_bound for noise in noises.values()):
        noises["launch-bound"] = assumed_launch_bound()
    started = time.monotonic()
    tallies = run(noises.values(), plan)
    show(Console(width=None if sys.stdout.isatty() else 132), noises, tallies, plan)
    print(f"{sum(t.trials for t in tallies if t.rule == OURS)} traces in {time.monotonic() - started:.0f} s")
    if options.json:
        content = {
            "plan": vars(plan),
            "looks": LOOKS,
            "baseline_blocks": BASELINE_BLOCKS,
            "noise": [described(noise) for noise in noises.values()],
            "tallies": [tally.to_json() for tally in tallies],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def show(console: Console, noises: dict[str, Noise], tallies: list[Tally], plan: Plan) -> None:
    bound = {noise.case for noise in noises.values() if noise.gpu_bound}
    console.print(noise_table(noises))
    console.print(false_alarms([t for t in tallies if t.case in bound]))
    console.print(detection([t for t in tallies if t.case in bound]))
    console.print(by_case(tallies, plan))
    console.print(reachable())


def _table(title: str, *columns: str) -> Table:
    table = new_table(title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    return table


def noise_table(noises: dict[str, Noise]) -> Table:
    table = _table(
        "The noise, as fitted",
        "case",
        "BF16 ms",
        "FP8 ms",
        "between blocks",
        "between processes",
        "neighbours' correlation",
        "from",
    )
    for noise in noises.values():
        table.add_row(
            noise.case,
            f"{noise.bf16_ms:.1f}",
            f"{noise.fp8_ms:.1f}",
            f"{noise.sigma_block:.2%}",
            f"{noise.sigma_run:.2%}",
            f"{autocorrelation(noise):+.2f}" if noise.recorded else "-",
            f"{noise.residuals.shape[0]} x {noise.residuals.shape[1]} blocks"
            if noise.recorded
            else noise.sources[0].split()[0],
        )
    return table


def false_alarms(tallies: list[Tally]) -> Table:
    trials = together(t for t in tallies if t.rule == OURS and t.condition == QUIET.name and t.change == 0).trials
    table = _table(
        f"False alarms per session of {SESSION} gated cases, nothing changed ({trials} cases a cell; [95 % interval])",
        "rule",
        *(condition.name for condition in CONDITIONS),
    )
    for rule in [OURS, *(r.name for r in TODAY)]:
        cells = []
        for condition in CONDITIONS:
            one = together(t for t in tallies if (t.rule, t.condition, t.change) == (rule, condition.name, 0.0))
            cells.append(_session(one, with_interval=rule == OURS))
        table.add_row(rule, *cells)
        if rule == OURS:
            unsaid = [
                together(t for t in tallies if (t.rule, t.condition, t.change) == (OURS, condition.name, 0.0))
                for condition in CONDITIONS
            ]
            table.add_row(
                "  INVALID or INCONCLUSIVE, per case",
                *(f"{t.each(sum(t.other.get(w, 0) for w in ('INVALID', 'INCONCLUSIVE'))):.1%}" for t in unsaid),
            )
    return table


def _session(tally: Tally, with_interval: bool) -> str:
    text = f"{per_session(tally.rate):.1%}"
    if with_interval:
        low, high = (per_session(rate) for rate in wilson(tally.failed, tally.gated))
        text = f"{per_session(tally.rate):.2%}\n[{low:.2%}, {high:.2%}]"
    return text


def detection(tallies: list[Tally]) -> Table:
    trials = together(t for t in tallies if t.rule == OURS and t.change == CHANGES[0]).trials
    table = _table(
        f"Share of regressions that fail, on a quiet machine ({trials} cases per cell), and GPU seconds a case",
        "rule",
        *(f"{change:.0%}" for change in CHANGES),
        "s, no change",
        "s at -3%",
        "most",
        "builds",
    )
    for rule in [OURS, *(r.name for r in TODAY)]:
        cells = []
        for change in CHANGES:
            one = together(t for t in tallies if (t.rule, t.change) == (rule, change))
            cells.append(f"{one.rate:.1%}")
        quiet = together(t for t in tallies if (t.rule, t.condition, t.change) == (rule, QUIET.name, 0.0))
        slower = together(t for t in tallies if (t.rule, t.change) == (rule, -0.03))
        table.add_row(
            rule,
            *cells,
            f"{quiet.each(quiet.gpu_seconds):.0f}",
            f"{slower.each(slower.gpu_seconds):.0f}",
            f"{max(quiet.most_gpu_seconds, slower.most_gpu_seconds):.0f}",
            f"{quiet.each(quiet.builds):.2f}",
        )
    return table


def by_case(tallies: list[Tally], plan: Plan) -> Table:
    table = _table(
        f"{OURS} case by case: tolerance {plan.tolerance:.0%}, baselines of {plan.processes} processes x "
        f"{BASELINE_BLOCKS} blocks, runs of up to {LOOKS[-1][0]} x {LOOKS[-1][1]}",
        "case",
        "fails per session",
        *(f"{change:.0%}" for change in CHANGES[:3]),
        "undecided at 0",
        "at -2%",
        "s at 0",
        "s at -2%",
        "most",
        "refused",
    )
    mine = [t for t in tallies if t.rule == OURS]
    for case in dict.fromkeys(t.case for t in mine):
        at = {t.change: t for t in mine if t.case == case and t.condition == QUIET.name}
        table.add_row(
            case,
            f"{per_session(at[0.0].rate):.2%}",
            *(f"{at[change].rate:.1%}" for change in CHANGES[:3]),
            *(f"{at[change].each(at[change].other.get('INCONCLUSIVE', 0)):.1%}" for change in (0.0, -0.02)),
            *(f"{at[change].each(at[change].gpu_seconds):.0f}" for change in (0.0, -0.02)),
            f"{at[-0.02].most_gpu_seconds:.0f}",
            f"{1 - at[0.0].gated / at[0.0].trials:.1%}",
        )
    return table


def reachable() -> Table:
    table = _table(
        f"By formula: the loss that fails {CAUGHT:.0%} of the time, by baseline x run processes",
        "noise between blocks, processes",
        *(f"{stored} x {run}" for stored in BASELINE_PROCESSES for run in RUN_PROCESSES if run <= stored),
    )
    for blocks, processes in NOISE:
        cells = (
            f"{caught(blocks, processes, stored, run):.1%}"
            for stored in BASELINE_PROCESSES
            for run in RUN_PROCESSES
            if run <= stored
        )
        table.add_row(f"{blocks:.1%}, {processes:.1%}", *cells)
    return table


def described(noise: Noise) -> dict[str, object]:
    """The fit as plain data, without the residuals."""
    return {
        "case": noise.case,
        "bf16_ms": noise.bf16_ms,
        "fp8_ms": noise.fp8_ms,
        "sigma_block": noise.sigma_block,
        "sigma_run": noise.sigma_run,
        "autocorrelation": autocorrelation(noise),
        "recorded": noise.recorded,
        "sources": noise.sources,
        "build_seconds": noise.build_seconds or BUILD_SECONDS,
    }


if __name__ == "__main__":
    sys.exit(main())
