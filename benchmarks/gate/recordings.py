"""What was measured, as arrays: recordings of every block, and stored baselines where a case has no recording yet.

A session's report becomes recordings, one file per case, beside those that there are:

    pytest suites --fp8-gpu=h200 -m core --fp8-report=DIR
    python -m benchmarks.gate.recordings DIR/report.json

Two sessions on different days are better than one long one. The format, schema 1:

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

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import load_baseline

ROOT = Path(__file__).parents[2]
RECORDINGS = Path(__file__).parent / "recordings"
BASELINES = (ROOT / "baselines" / "h200", ROOT / "benchmarks" / "claims" / "measured" / "h200")
"""The suite's baselines, and figures of cases that no gate asks any more: noise is noise of a GPU."""
SCHEMA = 1
EARLIER = ("d96f7cf262ba", "df30e8e8ca81")
"""Commits of recordings by an earlier way of measuring: the GPU stood idle more often than once a block. Their sessions
are no histories."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """One case as it was measured once, on one machine."""

    case: str
    bf16_ms: float
    fp8_ms: float
    steps_per_block: int
    dropped_steps: int
    log_ratios: list[Floats]
    """One array per process: one log ratio per ABBA block."""
    quads: list[Floats]
    """One array per process, (blocks, 4): log milliseconds of an ABBA block in the order taken. Empty where only the
    log ratios were kept."""


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
    print(*record(Path(sys.argv[1])), sep="\n")
