"""A folder of baselines as a whole, held against the cases of a suite: orphaned, unexercised, stale, unfit. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.store import Baseline
from pytest_fp8.case import OWN, Case
from pytest_fp8.errors import BaselineError
from pytest_fp8.gpu import CHIP_OF_MAJOR, KINDS

EMULATED = "emulated"
"""The folder of baselines that no GPU was asked for."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a baseline; an ``error`` makes a check fail, a ``note`` does not."""

    level: str
    kind: str
    """``unreadable``, ``misplaced``, ``orphaned``, ``redefined``, ``unfit``, ``too coarse``; notes: ``unexercised``,
    ``stale``, ``other library``, ``own model``."""
    gpu: str
    case: str
    message: str
    next_step: str = ""

    def to_json(self) -> dict[str, str]:
        return dict(vars(self))


def inspect(
    files: Mapping[Path, Baseline | BaselineError],
    cases: Sequence[Case],
    *,
    today: datetime.date,
    max_age: int,
    installed: Mapping[str, str],
    gpu: str = "",
) -> list[Finding]:
    """Everything there is to say about ``files`` (path below the baselines' folder -> what it holds).

    ``max_age`` in days; ``installed``: library versions here; ``gpu``: look at that one alone.
    """
    found: list[Finding] = []
    folders = {path.parts[0] for path in files if len(path.parts) > 1} | ({gpu} if gpu else set())
    for path, stored in sorted(files.items()):
        if gpu and path.parts[0] != gpu:
            continue
        found += _inspect_one(path, stored, cases, today, max_age, installed)
    for folder in sorted(folders):
        if gpu and folder != gpu:
            continue
        there = {path.stem for path in files if path.parts[0] == folder}
        found += [
            Finding(
                "note",
                "unexercised",
                folder,
                case.id,
                "the suite defines this case and no baseline is stored for it",
                f'pytest suites -k {case.id} --fp8-gpu={folder} --fp8-update-baselines --fp8-reason "first"',
            )
            for case in belonging(cases, folder)
            if case.id not in there and case.backend != "bf16" and case.model != OWN
        ]
    return found


def _inspect_one(
    path: Path,
    stored: Baseline | BaselineError,
    cases: Sequence[Case],
    today: datetime.date,
    max_age: int,
    installed: Mapping[str, str],
) -> list[Finding]:
    folder, name = (path.parts[0] if len(path.parts) > 1 else ""), path.stem
    if isinstance(stored, BaselineError):
        seen = stored.seen or stored.headline
        return [Finding("error", "unreadable", folder, name, seen, f"git checkout -- the file {path}, or delete it")]
    if (stored.gpu, stored.case) != (folder, name) or len(path.parts) != 2:
        message = f"{path} holds the baseline of {stored.gpu}/{stored.case}"
        return [Finding("error", "misplaced", folder, name, message, "move it back to where it belongs")]
    found: list[Finding] = []

    def add(level: str, kind: str, message: str, next_step: str = "") -> None:
        found.append(Finding(level, kind, folder, name, message, next_step))

    again = f'pytest suites -k {name} --fp8-gpu={folder} --fp8-update-baselines --fp8-reason "..."'
    case = {case.id: case for case in with_weights(belonging(cases, folder))}.get(name)
    if case is None and name.startswith(f"{OWN}-"):
        add("note", "own model", "its definition is known to its own test alone: the hash was not checked")
    elif case is None:
        add("error", "orphaned", "the suite has no such case for this GPU", "pytest-fp8 baselines prune")
    elif case.model == OWN:
        add("note", "own model", "the hash covers the user's functions, which were not loaded")
    elif case.digest() != stored.case_hash:
        add(
            "error", "redefined", f"measured for case hash {stored.case_hash}; the case is {case.digest()} today", again
        )
    unfit = stored.provenance.get("unfit")
    if unfit:
        add("error", "unfit", f"a candidate that was not fit to be stored: {unfit}", again)
    speed = stored.metrics.get("speedup")
    if speed is not None and case is not None:
        coarse = too_coarse(speed["values"], case.tolerance)
        if coarse:
            add("error", "too coarse", coarse, f"{again} --fp8-processes {len(speed['values']) + 2}")
    age = _age(stored.provenance, today)
    if age is not None and age > max_age:
        add("note", "stale", f"measured {age} days ago", again)
    others = other_major(stored.provenance.get("libraries", {}), installed)
    if others:
        add("note", "other library", f"measured with {', '.join(others)}")
    return found


def orphaned(stored: Iterable[str], cases: Sequence[Case], gpu: str) -> list[str]:
    """Names of stored baselines of a GPU that no case defines."""
    known = {case.id for case in with_weights(belonging(cases, gpu))}
    return sorted(name for name in stored if name not in known)


def belonging(cases: Iterable[Case], gpu: str) -> list[Case]:
    """The cases that a GPU's folder of baselines is for: those of its chip, or the emulated ones."""
    if gpu == EMULATED:
        return [case for case in cases if case.emulated]
    chips = {CHIP_OF_MAJOR.get(major) for kind in KINDS if kind.name == gpu for major in kind.majors}
    return [case for case in cases if not case.emulated and (case.chip in chips or not chips)]


def with_weights(cases: Iterable[Case]) -> list[Case]:
    """The cases, and each as ``--fp8-weights`` would make it: a baseline of either belongs to the suite."""
    listed = list(cases)
    own_weights = [replace(case, weights="from a folder") for case in listed if case.weights is None]
    return listed + [case for case in own_weights if case.model != OWN]


def too_coarse(values: Sequence[Sequence[float]], tolerance: float) -> str:
    """Why a speedup of these log ratios (per block and process) cannot gate at ``tolerance``, or an empty string."""
    from pytest_fp8.rules.speed import holds

    could_hold = holds(values)
    if could_hold <= tolerance:
        return ""
    return f"its processes spread too much to gate at {tolerance:.1%}; they could hold {could_hold:.1%}"


def other_major(libraries: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Libraries whose first two numbers differ from those installed here; what is not installed is not compared."""
    return [
        f"{name} {version} (here {installed[name]})"
        for name, version in sorted(libraries.items())
        if name in installed and _release(version) != _release(installed[name])
    ]


def _release(version: str) -> list[str]:
    """``2.11`` of ``2.11.0``: torch and its companions break things in the second number."""
    return version.split(".")[:2]


def _age(provenance: Mapping[str, Any], today: datetime.date) -> int | None:
    """Days since the measurement, its oldest part where parts were kept; ``None`` where no date is readable."""
    dates = [provenance.get("date"), *(kept.get("date") for kept in provenance.get("kept", {}).values())]
    try:
        return max((today - datetime.date.fromisoformat(str(date))).days for date in dates)
    except ValueError:
        return None
