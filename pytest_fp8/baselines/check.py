"""What is wrong with a folder of baselines: unreadable, misplaced, orphaned, redefined, unfit, too coarse. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.store import Baseline, gpu_option
from pytest_fp8.baselines.suite_cases import cases_for, with_and_without_weights
from pytest_fp8.case import OWN, Case
from pytest_fp8.errors import BaselineError


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
        found += _inspect_file(path, stored, cases, today, max_age, installed)
    for folder in sorted(folders):
        if gpu and folder != gpu:
            continue
        there = {path.stem for path in files if path.parts[0] == folder}
        found += [_unexercised(case, folder) for case in cases_for(cases, folder) if _lacks_one(case, there)]
    return found


def _inspect_file(
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
        return [Finding("error", "unreadable", folder, name, seen, f"restore {path} (git checkout), or delete it")]
    if (stored.gpu, stored.case) != (folder, name) or len(path.parts) != 2:
        message = f"{path} holds the baseline of {stored.gpu}/{stored.case}"
        return [Finding("error", "misplaced", folder, name, message, "move it back to where it belongs")]
    again = f'pytest suites -k {name} {gpu_option(folder)}--fp8-update-baselines --fp8-reason "..."'
    case = with_and_without_weights(cases_for(cases, folder)).get(name)
    found: list[Finding | None] = [_definition(stored, case, again)]
    if "unfit" in stored.provenance:
        message = f"a candidate that was not fit to be stored: {stored.provenance['unfit']}"
        found.append(Finding("error", "unfit", folder, name, message, again))
    values = stored.values("speedup")
    coarse = too_coarse(values, case.tolerance) if values and case is not None else ""
    if coarse:
        more = f"{again} --fp8-processes {len(values) + 2}"
        found.append(Finding("error", "too coarse", folder, name, coarse, more))
    age = _age(stored.provenance, today)
    if age > max_age:
        found.append(Finding("note", "stale", folder, name, f"measured {age} days ago", again))
    others = other_release(stored.provenance["libraries"], installed)
    if others:
        found.append(Finding("note", "other library", folder, name, f"measured with {', '.join(others)}"))
    return [finding for finding in found if finding is not None]


def _definition(stored: Baseline, case: Case | None, again: str) -> Finding | None:
    """Whether the suite still has the case, as it was when it was measured."""
    where = stored.gpu, stored.case
    if case is None and stored.case.startswith(f"{OWN}-"):
        return Finding("note", "own model", *where, "only its own test knows its definition: the hash was not checked")
    if case is None:
        return Finding(
            "error", "orphaned", *where, "the suite has no such case for this GPU", "pytest-fp8 baselines prune"
        )
    if case.model == OWN:
        return Finding("note", "own model", *where, "the hash covers the user's functions, which were not loaded")
    if case.digest() != stored.case_hash:
        message = f"measured for case hash {stored.case_hash}; the case is {case.digest()} today"
        return Finding("error", "redefined", *where, message, again)
    return None


def _lacks_one(case: Case, stored: Collection[str]) -> bool:
    return case.id not in stored and case.backend != "bf16" and case.model != OWN


def _unexercised(case: Case, gpu: str) -> Finding:
    message = "the suite defines this case and no baseline is stored for it"
    measure = f'pytest suites -k {case.id} {gpu_option(gpu)}--fp8-update-baselines --fp8-reason "first"'
    return Finding("note", "unexercised", gpu, case.id, message, measure)


def orphaned(stored: Iterable[str], cases: Sequence[Case], gpu: str) -> list[str]:
    """Names of stored baselines of a GPU that no case defines."""
    known = with_and_without_weights(cases_for(cases, gpu))
    return sorted(name for name in stored if name not in known)


def unused(stored: Collection[str], collected: Collection[str], asked: Collection[str]) -> list[str]:
    """Lines about the stored baselines that a whole run had no use for: of no case, or of a case that was asked
    nothing. All arguments are names of cases."""
    of_no_case = sorted(set(stored) - set(collected))
    not_asked = sorted(set(stored) & set(collected) - set(asked))
    lines = []
    if of_no_case:
        lines.append(f"{len(of_no_case)} orphaned baseline(s), of no case of this suite: {', '.join(of_no_case)}")
        lines.append("  next: pytest-fp8 baselines prune")
    if not_asked:
        lines.append(f"{len(not_asked)} unexercised baseline(s), asked nothing in this run: {', '.join(not_asked)}")
    return lines


def too_coarse(values: Sequence[Sequence[float]], tolerance: float) -> str:
    """Why a speedup of these log ratios (per block and process) cannot gate at ``tolerance``, or an empty string."""
    from pytest_fp8.rules.speed import processes_hold

    could_hold = processes_hold(values)
    if could_hold <= tolerance:
        return ""
    return f"its processes spread too much to gate at {tolerance:.1%}; they could hold {could_hold:.1%}"


def other_release(libraries: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Libraries whose first two numbers differ from those installed here: torch and its companions break things in the
    second. What is not installed is not compared."""
    from packaging.version import InvalidVersion, Version

    def release(version: str) -> tuple[int, int] | str:
        try:
            parsed = Version(version)
        except InvalidVersion:
            return version
        return parsed.major, parsed.minor

    return [
        f"{name} {version} (here {installed[name]})"
        for name, version in sorted(libraries.items())
        if name in installed and release(version) != release(installed[name])
    ]


def _age(provenance: Mapping[str, Any], today: datetime.date) -> int:
    """Days since the measurement, since its oldest part where values of earlier ones were kept."""
    dates = [provenance["date"], *(kept["date"] for kept in provenance.get("kept", {}).values())]
    return max((today - datetime.date.fromisoformat(date)).days for date in dates)
