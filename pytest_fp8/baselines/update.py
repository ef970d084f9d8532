"""What an update of baselines stores of a session's measurements, and why it stores others not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.check import too_coarse
from pytest_fp8.baselines.history import appended, why_not_appended
from pytest_fp8.baselines.metrics import gated_speedup
from pytest_fp8.baselines.record import Baseline, session_of
from pytest_fp8.baselines.review import Revision, revise
from pytest_fp8.baselines.source import Folder
from pytest_fp8.baselines.store import earlier_baseline, write_baseline
from pytest_fp8.baselines.variance import read_components
from pytest_fp8.errors import BaselineError, Fp8Error
from pytest_fp8.rules.change import RUNS_TO_FAIL

if TYPE_CHECKING:
    from pytest_fp8.report.ledger import Entry, Ledger


CANDIDATES = "candidates"
"""The folder of candidates below a report's. It has the cases of one run, and ``diff`` misses no others in it."""


@dataclass
class Update:
    """What was done with each case: ``problems`` fail the session, ``notes`` are for a person to read."""

    revisions: list[Revision] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def update_baselines(ledger: Ledger, folder: Path, origin: Mapping[str, Any]) -> Update:
    """Append this session to the baseline of each case below ``folder``.

    ``origin``: the provenance of this session's measurements, taken before the first file is written.
    """
    done = Update()
    for name, entry in ledger.entries.items():
        if not entry.metrics and not entry.errors:
            continue
        why = why_not_stored(ledger, name, folder)
        if why:
            done.problems.append(f"baseline of {name} was not updated: {why}")
            continue
        try:
            old, why_none = earlier_baseline(folder, entry.gpu, entry.case, entry.case_hash)
        except BaselineError as error:
            done.problems.append(f"baseline of {name} was not updated: {error.message}")
            continue
        new = measured(entry, origin)
        why = why_not_appended(old, new.newest)
        if why:
            done.problems.append(f"baseline of {name} was not updated: {why}")
            continue
        revision = revise(old, new, why_none, tolerances_of(entry), read_components(Folder(folder), entry.gpu))
        done.revisions.append(revision)
        try:
            done.written.append(write_baseline(folder, appended(old, new, revision.starts())))
        except Fp8Error as error:
            done.problems.append(error.message)
            continue
        if "speedup" in new.metrics:
            done.notes += _launch_bound(entry, folder)
    return done


def measured(entry: Entry, origin: Mapping[str, Any], unfit: str = "") -> Baseline:
    """What this session measured of a case, as a baseline of one session."""
    values = {name: metric["values"] for name, metric in entry.metrics.items()}
    session = session_of(origin_of(entry, origin), values, unfit)
    return Baseline(entry.case, entry.case_hash, entry.gpu, (session,))


def not_finite(entry: Entry) -> str:
    """A metric with a value that no baseline can hold, or an empty string."""
    for name, metric in entry.metrics.items():
        for row in metric["values"]:
            if not all(map(math.isfinite, row if isinstance(row, list) else [row])):
                return name
    return ""


def origin_of(entry: Entry, origin: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of a case's figures: an emulated case used no GPU."""
    return {**origin, "gpu": {"name": "emulated"} if entry.gpu == "emulated" else origin["gpu"]}


def tolerances_of(entry: Entry) -> dict[str, float]:
    """The tolerances of the case itself: those that its mark or the suite gives, and the loss rule's margin."""
    return {name: float(metric["tolerance"]) for name, metric in entry.metrics.items()}


def candidate(ledger: Ledger, entry: Entry, folder: Path, origin: Mapping[str, Any]) -> Baseline:
    """What an update would store of a case: the stored sessions, and this one behind them. ``unfit`` of the session
    says why an update would refuse it."""
    old, why_none = earlier_baseline(folder, entry.gpu, entry.case, entry.case_hash)
    new = measured(entry, origin)
    why = why_not_stored(ledger, entry.case, folder) or why_not_appended(old, new.newest)
    new = measured(entry, origin, unfit=why)
    revision = revise(old, new, why_none, tolerances_of(entry), read_components(Folder(folder), entry.gpu))
    return appended(old, new, revision.starts())


def why_not_stored(ledger: Ledger, case: str, folder: Path) -> str:
    """Why this session's measurements of a case are no baseline, or an empty string. ``folder``: of the baselines, with
    the GPU's variances. Raises :class:`BaselineError` where these cannot be believed."""
    entry = ledger.entries[case]
    if entry.namesakes:
        return (
            f"{entry.namesakes} different models or settings were asked under this name; give each its own: "
            "@pytest.mark.fp8(name='...')"
        )
    layers = entry.decisions.get("layers")
    not_run = (ledger.open_tests or {}).get(case)
    if not_run:
        names = ", ".join(sorted(not_run))
        return f"the run was cut short before all its tests had run (open: {names}); run its update again"
    if entry.errors:
        return f"a question of it ended with an error ({entry.errors[0]})"
    if layers is None or layers["verdict"] != "PASS":
        seen = layers["headline"] if layers else "the layers question was not asked in this run: select that test, too"
        return f"FP8 was not shown to run ({seen})"
    for question, decision in entry.decisions.items():
        if decision["verdict"] == "INVALID":
            what = "timing" if question in ("speedup", "faster") else f"{question} question"
            return f"the {what} is invalid ({decision['headline']})"
        if decision["verdict"] == "FAIL" and question in ("numerics", "loss", "checkpoints"):
            return f"the {question} question failed ({decision['headline']})"
    if name := not_finite(entry):
        return f"{name} is not finite"
    metric = gated_speedup(entry.metrics)
    speedup = entry.metrics.get(metric)
    if speedup is None:
        return ""
    values, components = speedup["values"], read_components(Folder(folder), entry.gpu)
    why = too_few({metric: values}) or too_coarse(metric, values, speedup["tolerance"], components)
    if not why:
        return ""
    scattered = _speed(entry).get("scattered", "")
    return f"{why} (more of them: --fp8-processes)" + (f"; {scattered}" if scattered else "")


def _speed(entry: Entry) -> Mapping[str, Any]:
    """The numbers of its speed."""
    numbers: Mapping[str, Any] = (entry.decisions.get("speedup") or entry.decisions.get("faster") or {}).get(
        "numbers", {}
    )
    return numbers


def too_few(metrics: Mapping[str, Sequence[Any]]) -> str:
    """Why a session's speedup is no evidence, or an empty string: a finding needs as many processes, too."""
    gated = metrics.get(gated_speedup(metrics))
    if gated is None or len(gated) >= RUNS_TO_FAIL:
        return ""
    return "its speedup stands on one process, which may be slow by chance"


def _launch_bound(entry: Entry, folder: Path) -> list[str]:
    """A note where the step time that was stored depends on the host as much as on the GPU."""
    waits = _speed(entry).get("waits_for_host", "")
    steps = entry.metrics["speedup"]
    if "busy_speedup" in entry.metrics and not waits:
        coarse = too_coarse("speedup", steps["values"], steps["tolerance"], read_components(Folder(folder), entry.gpu))
        waits = f"in step time {coarse}; in busy time they do not" if coarse else ""
    if not waits:
        return []
    if "busy_speedup" in entry.metrics:
        return [
            f"baseline of {entry.case} is gated on busy time, since step time is this host's as much as the GPU's: "
            f"{waits}\n  next: a larger batch, or a quieter host for a new file, if step time is to be gated"
        ]
    return [
        f"baseline of {entry.case} is this host's as much as the GPU's: {waits}\n"
        "  next: store one with a larger batch; on a slower host this one's gate may fail"
    ]
