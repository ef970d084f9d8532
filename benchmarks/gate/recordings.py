"""What was measured, as arrays: recordings of every block, and stored baselines where a case has no recording yet."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import load_baseline

ROOT = Path(__file__).parents[2]
RECORDINGS = Path(__file__).parent / "recordings"
BASELINES = (ROOT / "baselines" / "h200", ROOT / "benchmarks" / "claims" / "measured" / "h200")
"""The suite's baselines, and figures of cases that no gate asks any more: noise is noise of a GPU."""
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


def load(recordings: Path = RECORDINGS, baselines: Sequence[Path] = BASELINES) -> dict[str, list[Measured]]:
    """Case -> its measurements: the recordings, or the stored baseline where there is no recording. Of cases that are
    gated on step time: blocks are of step time."""
    found: dict[str, list[Measured]] = {}
    for path in sorted(recordings.glob("*.json")):
        one = from_recording(json.loads(path.read_text()))
        found.setdefault(one.case, []).append(one)
    every = stored_in(baselines)
    on_busy = on_busy_time(every)
    for stored in every:
        if stored.case not in found and stored.values("speedup"):
            found[stored.case] = [from_baseline(stored)]
    return {case: measured for case, measured in found.items() if case not in on_busy}


LOOKED_AT = 1.5
"""How often the GPU's state was noted per ABBA block in recordings of an earlier way of measuring, at least: each note
lets the GPU stand idle. Since then once a block."""


def histories(
    recordings: Path = RECORDINGS, baselines: Sequence[Path] = BASELINES
) -> dict[str, dict[str, list[list[float]]]]:
    """Case -> session -> its processes' log ratios: from recordings and stored baselines. A session is named by its
    commit where that was recorded, and by commit and run elsewhere. Sessions of a case that was recorded by an earlier
    way of measuring are left out, and so is BF16 against BF16."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    earlier = set()
    # By the stem, so that <case>.json comes before <case>.2.json.
    for path in sorted(recordings.glob("*.json"), key=lambda path: path.stem):
        data = json.loads(path.read_text())
        one, session = from_recording(data), (data["case"], data["provenance"]["commit"][:12])
        # The notes of a case stand beside each of its processes: see record.from_report.
        blocks = sum(len(process["bf16"]) // 2 for process in data["processes"])
        if len(data["processes"][0]["clocks_mhz"]) > LOOKED_AT * blocks:
            earlier.add(session)
        elif not data["case"].endswith("-bf16"):
            found.setdefault(data["case"], {})[session[1]] = [x.tolist() for x in one.log_ratios]
    every = stored_in(baselines)
    on_busy = on_busy_time(every)
    # Recordings are of step time, which says nothing of how busy time differs.
    found = {case: sessions for case, sessions in found.items() if case not in on_busy}
    recorded = {commit for sessions in found.values() for commit in sessions}
    for stored in every:
        metric = "busy_speedup" if stored.case in on_busy else "speedup"
        for session in stored.measured_in(metric):
            if (stored.case, session.commit) not in earlier:
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


def from_recording(data: dict) -> Measured:
    """A recording, format in ``record.py``. Blocks under a throttle or beside a stranger are left out, as the gate
    leaves them out. Raises ``ValueError`` where nothing is left."""
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
