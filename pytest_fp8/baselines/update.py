"""What an update stores of a session, and why other sessions not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.check import too_coarse
from pytest_fp8.baselines.record import MAX_SESSIONS, Baseline, StoredSession
from pytest_fp8.baselines.review import Revision, revise
from pytest_fp8.baselines.store import Folder, components_in, earlier_baseline, write_baseline
from pytest_fp8.errors import BaselineError
from pytest_fp8.stats.components import Components
from pytest_fp8.stats.looks import RUNS_TO_FAIL

if TYPE_CHECKING:
    from pytest_fp8.report.record import Record
    from pytest_fp8.report.rows import Row


@dataclass
class Update:
    """What was done with each case; ``problems`` fail the session."""

    revisions: list[Revision] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def update_baselines(record: Record, folder: Path, origin: Mapping[str, Any]) -> Update:
    """Append this session to the baseline of each case below ``folder``.

    ``origin``: the provenance of this session's measurements, taken before the first file is written.
    """
    done = Update()
    # Of what was stored before this session, whichever case is stored first.
    known = {gpu: components_in(Folder(folder), gpu) for gpu in {entry.gpu for entry in record.entries.values()}}
    for name, entry in record.entries.items():
        if not entry.metrics and not entry.errors:
            continue
        new, components = measured(entry, origin), known[entry.gpu]
        why = why_not_stored(record, name) or _unfit(entry, new, components)
        if not why:
            why = _store(done, folder, entry, new, components)
        if why:
            done.problems.append(f"baseline of {name} was not updated: {why}")
    return done


def _store(done: Update, folder: Path, entry: Row, new: Baseline, components: Components) -> str:
    """Append the session of ``new`` to its baseline; gives why it could not be."""
    # Those of the case itself: its mark or the suite gives them, and the loss rule its margin.
    tolerances = {name: float(metric["tolerance"]) for name, metric in entry.metrics.items()}
    try:
        old, why_none = earlier_baseline(Folder(folder), new.gpu, new.case, new.case_hash)
        revision = revise(old, new, why_none, tolerances, components)
        done.written.append(write_baseline(folder, appended(old, new, revision.starts())))
        done.revisions.append(revision)
    except BaselineError as error:
        # Those before it are stored, and are told.
        return error.message
    return ""


def appended(old: Baseline | None, new: Baseline, starts: Sequence[str]) -> Baseline:
    """``old`` with the newest session of ``new`` behind its own; ``starts``: the metrics that begin a new level in it.

    ``old`` is ``None`` where nothing can be compared: then the session is the first. Where the file is full the oldest
    session leaves.
    """
    session = replace(new.newest, starts=tuple(sorted(starts)))
    before = old.sessions if old is not None else ()
    return replace(new, sessions=(*before, session)[-MAX_SESSIONS:])


def measured(entry: Row, origin: Mapping[str, Any]) -> Baseline:
    """What this session measured of a case, as a baseline of one session. An emulated case used no GPU."""
    values = {name: metric["values"] for name, metric in entry.metrics.items()}
    host_bound = entry.speed is not None and bool(entry.speed.numbers["host_bound"])
    gpu = {"name": "emulated"} if entry.gpu == "emulated" else origin["gpu"]
    session = StoredSession(**{**origin, "gpu": gpu}, metrics=values, host_bound=host_bound)
    return Baseline(entry.case, entry.case_hash, entry.gpu, (session,))


def why_not_stored(record: Record, case: str) -> str:
    """Why this session's answers to a case are no baseline, or an empty string."""
    entry = record.entries[case]
    if entry.namesakes:
        return (
            f"{entry.namesakes} different models or settings were asked under this name; give each its own: "
            "@pytest.mark.fp8(name='...')"
        )
    layers = entry.decisions.get("layers")
    if not_run := record.open_tests.get(case):
        names = ", ".join(sorted(not_run))
        return f"the run was cut short before all its tests had run (open: {names}); run its update again"
    if entry.errors:
        return f"a question of it ended with an error ({entry.errors[0].headline})"
    if layers is None or layers.verdict != "PASS":
        seen = layers.headline if layers else "the layers question was not asked in this run: select that test, too"
        return f"FP8 was not shown to run ({seen})"
    for question, decision in entry.decisions.items():
        if decision.verdict == "INVALID":
            what = "timing" if question in ("speedup", "faster") else f"{question} question"
            return f"the {what} is invalid ({decision.headline})"
        if decision.verdict == "FAIL" and question in ("numerics", "loss", "checkpoints"):
            return f"the {question} question failed ({decision.headline})"
    return ""


def _unfit(entry: Row, new: Baseline, components: Components) -> str:
    """Why its figures cannot be gated on, or an empty string."""
    for name, values in new.newest.metrics.items():
        flat = (x for row in values for x in (row if isinstance(row, list) else [row]))
        if not all(map(math.isfinite, flat)):
            return f"{name} is not finite"
    if not new.gated:
        return ""
    if len(new.values(new.gated)) < RUNS_TO_FAIL:
        return "its speedup stands on one process, which may be slow by chance"
    return too_coarse(new, entry.metrics[new.gated]["tolerance"], components)
