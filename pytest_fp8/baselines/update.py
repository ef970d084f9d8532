"""What an update of baselines stores of a session's measurements, and why it stores others not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.check import too_coarse
from pytest_fp8.baselines.review import Revision, revise, revised
from pytest_fp8.baselines.store import Baseline, earlier_baseline, write_baseline
from pytest_fp8.errors import Fp8Error

if TYPE_CHECKING:
    from pytest_fp8.report.ledger import Entry, Ledger


@dataclass
class Update:
    """What was done with each case: ``problems`` fail the session, ``notes`` are for a person to read."""

    revisions: list[Revision] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def update_baselines(ledger: Ledger, folder: Path, origin: Mapping[str, Any]) -> Update:
    """Store below ``folder`` what moved by more than noise in each case of the session.

    ``origin``: the provenance of this session's measurements, taken before the first file is written.
    """
    done = Update()
    for name, entry in ledger.entries.items():
        if not entry.metrics and not entry.errors:
            continue
        why = why_not_stored(ledger, name)
        if why:
            done.problems.append(f"baseline of {name} was not updated: {why}")
            continue
        old, why_none = earlier_baseline(folder, entry.gpu, entry.case, entry.case_hash)
        new = measured(entry, origin)
        revision = revise(old, new, why_none)
        done.revisions.append(revision)
        stored = revised(old, new, revision)
        if stored is None:
            continue
        try:
            done.written.append(write_baseline(folder, stored))
        except Fp8Error as error:
            done.problems.append(error.message)
            continue
        if "speedup" in new.metrics and stored.metrics["speedup"] is new.metrics["speedup"]:
            done.notes += _launch_bound(entry)
    return done


def measured(entry: Entry, origin: Mapping[str, Any]) -> Baseline:
    """What this session measured of a case, as a baseline."""
    gpu = {"name": "emulated"} if entry.gpu == "emulated" else origin["gpu"]
    return Baseline(entry.case, entry.case_hash, entry.gpu, entry.metrics, {**origin, "gpu": gpu})


def candidate(ledger: Ledger, entry: Entry, folder: Path, origin: Mapping[str, Any]) -> Baseline:
    """What an update would store of a case: its own metrics, and the stored values of questions that were not asked.

    ``unfit`` in its provenance says why an update would refuse it.
    """
    new = measured(entry, origin)
    old, _ = earlier_baseline(folder, entry.gpu, entry.case, entry.case_hash)
    why = why_not_stored(ledger, entry.case)
    provenance = {**new.provenance, "unfit": why} if why else new.provenance
    return replace(new, metrics={**(old.metrics if old is not None else {}), **new.metrics}, provenance=provenance)


def why_not_stored(ledger: Ledger, case: str) -> str:
    """Why this session's measurements of a case are no baseline, or an empty string."""
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
        return f"its arms failed ({entry.errors[0]})"
    if layers is None or layers["verdict"] != "PASS":
        seen = layers["headline"] if layers else "the layers question was not asked in this run"
        return f"FP8 was not shown to run ({seen})"
    for question in ("numerics", "loss", "checkpoints"):
        decision = entry.decisions.get(question)
        if decision is not None and decision["verdict"] == "FAIL":
            return f"the {question} question failed ({decision['headline']})"
    for question in ("speedup", "faster"):
        speed = entry.decisions.get(question)
        if speed is not None and speed["verdict"] == "INVALID":
            return f"the timing is invalid ({speed['headline']})"
    speedup = entry.metrics.get("speedup")
    coarse = too_coarse(speedup["values"], speedup["tolerance"]) if speedup is not None else ""
    return f"{coarse} (more of them: --fp8-processes)" if coarse else ""


def _launch_bound(entry: Entry) -> list[str]:
    """A note where the speedup that was stored depends on the host as much as on the GPU."""
    numbers = (entry.decisions.get("speedup") or entry.decisions.get("faster") or {}).get("numbers", {})
    waits = numbers.get("waits_for_host", "")
    if not waits:
        return []
    return [
        f"baseline of {entry.case} is this host's as much as the GPU's: {waits}\n"
        "  next: store one with a larger batch; on a slower host this one's gate may fail"
    ]
