"""What the gate catches, and what it leaves alone, beside the rules that people use today.

    python -m benchmarks.gate [--seed 3] [--tolerance 0.02]

A minute or two on two cores. Every rate comes with its number of trials; seeds are fixed.

A session's report becomes recordings, one file per case, beside those that there are. Two sessions on different days
are better than one long one:

    pytest suites --fp8-gpu=h200 -m core --fp8-report=DIR
    python -m benchmarks.gate --record DIR/report.json

The format of a recording, schema 1:

``schema``, ``case``, ``case_hash``
    The case as the suite defines it, and the hash of that definition.
``steps_per_block``
    Training steps in one block; ``dropped_steps`` more are run and not counted each time the arms change places.
``order``
    ``abba``, or ``turns`` where the arms do not fit the GPU together (half of BF16, all of FP8, the rest of BF16).
``processes``
    One entry per fresh pair of processes: ``bf16`` and ``fp8``, milliseconds per step of every block in the order
    taken. Two entries of each make one ABBA block: ``bf16[2i], fp8[2i], fp8[2i + 1], bf16[2i + 1]``. Beside them what
    the report has of the whole case: ``clocks_mhz`` (SM clock after each ABBA block; where the arms take turns, after
    each of the three), ``throttles`` (reasons seen), ``strangers`` (how many other processes used the GPU).
``provenance``
    Date, commit, GPU, driver, libraries, reason. No host name, no user name, no path.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

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
    Measured,
    Plan,
    Tally,
    fit,
    replay,
    run,
    wilson,
)
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.report.table import new_table
from pytest_fp8.stats.components import estimate

ROOT = Path(__file__).parents[2]
RECORDINGS = Path(__file__).parent / "recordings"
BASELINES = (ROOT / "baselines" / "h200", ROOT / "benchmarks" / "claims" / "measured" / "h200")
"""The suite's baselines, and figures of cases that no gate asks any more: noise is noise of a GPU."""
SCHEMA = 1
EARLIER = ("d96f7cf262ba", "df30e8e8ca81")
"""Commits of recordings by an earlier way of measuring: the GPU stood idle more often than once a block. Their sessions
are no histories."""
RULES = (OURS, *TODAY)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=Plan.tolerance)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--record", type=Path, metavar="REPORT", help="of a session: write its recordings, and end")
    options = parser.parse_args(arguments)
    if options.record:
        print(*record(options.record), sep="\n")
        return 0
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


# -- the tables -------------------------------------------------------------------------------------------------------


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


# -- what was measured ------------------------------------------------------------------------------------------------


def load() -> dict[str, list[Measured]]:
    """Case -> its measurements: the recordings, or the stored baseline where there is no recording. Of FP8 cases that
    are gated on step time: blocks are of step time."""
    found: dict[str, list[Measured]] = {}
    for path in sorted(RECORDINGS.glob("*.json")):
        one = from_recording(json.loads(path.read_text()))
        found.setdefault(one.case, []).append(one)
    every = stored_in(BASELINES)
    for stored in every:
        if stored.case not in found and stored.values("speedup"):
            found[stored.case] = [from_baseline(stored)]
    left_out = on_busy_time(every)
    return {case: each for case, each in found.items() if case not in left_out and not case.endswith("-bf16")}


def histories(baselines: Sequence[Path] = BASELINES) -> dict[str, dict[str, list[list[float]]]]:
    """Case -> session -> its processes' log ratios: from recordings and stored baselines. A session is named by its
    commit where that was recorded, and by commit and run elsewhere. BF16 against BF16 is left out."""
    every = stored_in(baselines)
    on_busy = on_busy_time(every)
    found: dict[str, dict[str, list[list[float]]]] = {}
    recorded = set()
    # By the stem, so that <case>.json comes before <case>.2.json.
    for path in sorted(RECORDINGS.glob("*.json"), key=lambda path: path.stem):
        data = json.loads(path.read_text())
        case, commit = data["case"], data["provenance"]["commit"][:12]
        # Recordings are of step time, which says nothing of how busy time differs.
        if commit not in EARLIER and case not in on_busy and not case.endswith("-bf16"):
            found.setdefault(case, {})[commit] = [x.tolist() for x in from_recording(data).log_ratios]
            recorded.add(commit)
    for stored in every:
        metric = "busy_speedup" if stored.case in on_busy else "speedup"
        for session in stored.measured_in(metric):
            if session.commit not in EARLIER:
                alone = session.commit in recorded and stored.case not in on_busy
                name = session.commit if alone else f"{session.commit} {session.run}"
                found.setdefault(stored.case, {}).setdefault(name, list(session.metrics[metric]))
    return found


def on_busy_time(baselines: Sequence[Baseline]) -> set[str]:
    """The cases that are gated on busy time: an arm waits for its host."""
    return {stored.case for stored in baselines if stored.gated == "busy_speedup"}


def stored_in(folders: Sequence[Path]) -> list[Baseline]:
    """The baselines in these folders, by the names of their cases."""
    found = [path for folder in folders for path in folder.glob("[!_]*.json")]
    return [load_baseline(path) for path in sorted(found, key=lambda path: path.name)]


def from_recording(data: dict[str, Any]) -> Measured:
    """A recording. Blocks under a throttle or beside a stranger are left out, as the gate leaves them out. Raises
    ``ValueError`` where nothing is left."""
    quads = []
    for process in data["processes"]:
        if process["throttles"] or process["strangers"]:
            continue
        bf16, fp8 = (np.log(np.asarray(process[arm], dtype=float)) for arm in ("bf16", "fp8"))
        quads.append(np.column_stack([bf16[0::2], fp8[0::2], fp8[1::2], bf16[1::2]]))
    if not quads:
        raise ValueError(f"a recording of {data['case']}: no undisturbed process in it")
    together = np.concatenate(quads)
    return Measured(
        case=data["case"],
        bf16_ms=math.exp(float(np.median(together[:, [0, 3]]))),
        fp8_ms=math.exp(float(np.median(together[:, [1, 2]]))),
        steps_per_block=data["steps_per_block"],
        dropped_steps=data["dropped_steps"],
        log_ratios=[(q[:, 0] + q[:, 3] - q[:, 1] - q[:, 2]) / 2 for q in quads],
        quads=quads,
    )


def from_baseline(stored: Baseline) -> Measured:
    """A stored baseline: log ratios of six blocks per process, and each arm's median; the blocks themselves are gone.

    Steps per block are computed as ``BlockTimer`` does; 8B's arms are taken to give memory back between turns.
    """
    bf16 = float(np.median(stored.values("bf16_ms")))
    return Measured(
        case=stored.case,
        bf16_ms=bf16,
        fp8_ms=float(np.median(stored.values("fp8_ms"))),
        steps_per_block=max(1, math.ceil(250 / (0.75 * bf16))),
        dropped_steps=2 if stored.case.startswith("8b-") else 1,
        log_ratios=[np.asarray(x, dtype=float) for x in stored.values("speedup")],
        quads=[],
    )


def record(report: Path, out: Path = RECORDINGS) -> list[Path]:
    """Write the timed blocks of a session's report, one file per case: ``<case>.json``, or the first
    ``<case>.<n>.json`` that does not exist. The GPU's state is known for the whole of a case there, so that each of
    its processes carries all of it."""
    from pytest_fp8.baselines.atomic import write_atomically
    from pytest_fp8.plain import to_plain
    from pytest_fp8.report.files import read_report

    content, written = read_report(report), []
    for name, row in content.entries.items():
        timing = dict(row.timing)
        if not timing:
            continue
        shared = {key: timing.pop(key) for key in ("clocks_mhz", "throttles", "strangers")}
        timing["processes"] = [{**process, **shared} for process in timing["processes"]]
        facts = {"schema": SCHEMA, "case": name, "case_hash": row.case_hash, **timing}
        path, number = out / f"{name}.json", 2
        while path.exists():
            path, number = out / f"{name}.{number}.json", number + 1
        facts["provenance"] = to_plain(content.provenance)
        write_atomically(path, json.dumps(facts, indent=1, sort_keys=True) + "\n")
        written.append(path)
    return written


if __name__ == "__main__":
    sys.exit(main())
