"""What is wrong with a folder of baselines: unreadable, misplaced, orphaned, redefined, unfit, too coarse. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_fp8.baselines.metrics import gated_speedup, lacking
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.store import gpu_option
from pytest_fp8.baselines.suite_cases import cases_for, with_and_without_weights
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import B, Code
from pytest_fp8.errors import BaselineError
from pytest_fp8.rules.variance import MEASURED, Components

NOTES = B.UNEXERCISED, B.INCOMPLETE, B.STALE, B.MEASURED_OTHERWISE, B.OTHER_LIBRARY, B.OWN_MODEL
"""Other codes are errors."""


@dataclass(frozen=True)
class Note:
    """One thing to know about a baseline; an ``error`` makes a check fail, a ``note`` does not."""

    code: Code
    gpu: str
    case: str
    message: str
    next_step: str = ""

    @property
    def level(self) -> str:
        return "note" if self.code in NOTES else "error"

    @property
    def kind(self) -> str:
        return self.code.slug.replace("-", " ")

    def to_json(self) -> dict[str, str]:
        return {"level": self.level, "kind": self.kind, **vars(self)}


def inspect(
    files: Mapping[Path, Baseline | BaselineError],
    cases: Sequence[Case],
    *,
    today: datetime.date,
    max_age: int,
    installed: Mapping[str, str],
    gpu: str = "",
    components: Callable[[str], Components] = lambda gpu: MEASURED,
) -> list[Note]:
    """Everything there is to say about ``files`` (path below the baselines' folder -> what it holds).

    ``max_age`` in days; ``installed``: library versions here; ``gpu``: look at that one alone. ``components``: a
    GPU's variances.
    """
    found: list[Note] = []
    there: dict[str, set[str]] = {gpu: set()} if gpu else {}
    for path in files:
        folder = path.parts[0] if len(path.parts) > 1 else ""
        if not gpu or path.parts[0] == gpu:
            there.setdefault(folder, set()).add(path.stem)
    known = {folder: with_and_without_weights(cases_for(cases, folder)) for folder in there}
    variances = {folder: components(folder) for folder in there}
    for path, stored in sorted(files.items()):
        folder = path.parts[0] if len(path.parts) > 1 else ""
        if not gpu or path.parts[0] == gpu:
            case, known_components = known[folder].get(path.stem), variances[folder]
            found += _inspect_file(path, stored, case, today, max_age, installed, known_components)
    for folder in sorted(set(there) - {""}):
        lacked = [case for case in cases_for(cases, folder) if _lacks_one(case, there[folder])]
        found += [_unexercised(case, folder) for case in lacked]
    return found


def _inspect_file(
    path: Path,
    stored: Baseline | BaselineError,
    case: Case | None,
    today: datetime.date,
    max_age: int,
    installed: Mapping[str, str],
    components: Components,
) -> list[Note]:
    folder, name = (path.parts[0] if len(path.parts) > 1 else ""), path.stem
    if isinstance(stored, BaselineError):
        seen = stored.seen or stored.headline
        return [Note(stored.code or B.UNREADABLE, folder, name, seen, f"restore {path} (git checkout), or delete it")]
    if (stored.gpu, stored.case) != (folder, name) or len(path.parts) != 2:
        message = f"{path} holds the baseline of {stored.gpu}/{stored.case}"
        return [Note(B.MISPLACED, folder, name, message, "move it back to where it belongs")]
    run = "pytest-fp8 suites" if case is not None else "pytest"
    again = f'{run} -k {name} {gpu_option(folder)}--fp8-update-baselines --fp8-reason "..."'
    found: list[Note | None] = [_definition(stored, case, again)]
    unfit = [session.unfit for session in stored.sessions if session.unfit]
    if unfit:
        message = f"a candidate that was not fit to be stored: {unfit[-1]}"
        found.append(Note(B.UNFIT, folder, name, message, again))
    missing = lacking(case, stored.metrics) if case is not None else []
    if missing:
        message = f"its case asks for {', '.join(missing)}, and none is stored"
        found.append(Note(B.INCOMPLETE, folder, name, message, again))
    metric = gated_speedup(stored.metrics)
    values = stored.values(metric)
    # The speed of a case that is no longer asked for it gates nothing.
    if case is not None and case.asks("speedup") and values:
        coarse = too_coarse(metric, values, case.tolerance, components)
        more = f"{again} --fp8-processes {len(values) + 2}"
        found.append(Note(B.TOO_COARSE, folder, name, coarse, more) if coarse else None)
    if moved := measured_otherwise(stored):
        message = f"figures were taken another way than today: measurement {moved} has moved them since"
        found.append(Note(B.MEASURED_OTHERWISE, folder, name, message, again))
    age = _age(stored, today)
    if age > max_age:
        found.append(Note(B.STALE, folder, name, f"measured {age} days ago", again))
    others = other_release(stored.newest.libraries, installed)
    if others:
        found.append(Note(B.OTHER_LIBRARY, folder, name, f"measured with {', '.join(others)}"))
    return [finding for finding in found if finding is not None]


def _definition(stored: Baseline, case: Case | None, again: str) -> Note | None:
    """Whether the suite still has the case, as it was when it was measured."""
    where = stored.gpu, stored.case
    if case is None and of_own_model(stored.case):
        return Note(B.OWN_MODEL, *where, "only its own test knows its definition: the hash was not checked")
    if case is None:
        return Note(B.ORPHANED, *where, "the suite has no such case for this GPU", "pytest-fp8 baselines prune")
    if case.model == OWN:
        return Note(B.OWN_MODEL, *where, "the hash covers the user's functions, which were not loaded")
    if case.digest() != stored.case_hash:
        message = f"measured for case hash {stored.case_hash}; the case is {case.digest()} today"
        return Note(B.REDEFINED, *where, message, again)
    return None


def _lacks_one(case: Case, stored: Collection[str]) -> bool:
    return case.id not in stored and case.backend != "bf16" and case.model != OWN


def _unexercised(case: Case, gpu: str) -> Note:
    message = "the suite defines this case and no baseline is stored for it"
    measure = f'pytest-fp8 suites -k {case.id} {gpu_option(gpu)}--fp8-update-baselines --fp8-reason "first"'
    return Note(B.UNEXERCISED, gpu, case.id, message, measure)


def of_own_model(name: str) -> bool:
    """Whether a baseline is of a user's model, named or not: its test defines it, which no suite needs to list."""
    return name.startswith((f"{OWN}-", f"{OWN}."))


def orphaned(stored: Iterable[str], cases: Sequence[Case], gpu: str) -> list[str]:
    """Names of stored baselines of a GPU that no case defines; never those of own models."""
    known = with_and_without_weights(cases_for(cases, gpu))
    return sorted(name for name in stored if name not in known and not of_own_model(name))


def unused(stored: Collection[str], collected: Collection[str], asked: Collection[str]) -> tuple[list[str], list[str]]:
    """Lines about the stored baselines that a whole run had no use for: those of no case, and those of a case that was
    asked nothing. All arguments are names of cases."""
    of_no_case = sorted(set(stored) - set(collected))
    not_asked = sorted(set(stored) & set(collected) - set(asked))
    orphaned, unexercised = [], []
    if of_no_case:
        orphaned.append(f"{len(of_no_case)} orphaned baseline(s), of no case of this suite: {', '.join(of_no_case)}")
        orphaned.append("  next: delete these files, or find out which test was to ask them")
    if not_asked:
        named = ", ".join(not_asked)
        unexercised.append(f"{len(not_asked)} unexercised baseline(s), asked nothing in this run: {named}")
    return orphaned, unexercised


def too_coarse(metric: str, values: Sequence[Sequence[float]], tolerance: float, components: Components) -> str:
    """Why a speedup of these log ratios cannot gate at ``tolerance``, or an empty string."""
    from pytest_fp8.rules.speed import processes_hold

    held = processes_hold(values, components, busy=metric == "busy_speedup")
    if held <= tolerance:
        return ""
    return f"its processes spread too much to gate at {tolerance:.1%}; they could hold {held:.1%}"


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


def measured_otherwise(stored: Baseline) -> int:
    """The measurement that has moved a metric since its newest session, or 0. Beside a newer one, older ones are
    sessions like others: an update would not take them out."""
    return max((stored.measured_in(name)[-1].moved_by for name in stored.metrics), default=0)


def _age(stored: Baseline, today: datetime.date) -> int:
    """Days since the measurement, of the metric whose newest one is the oldest."""
    newest = [stored.measured_in(name)[-1].date for name in stored.metrics]
    return max((today - datetime.date.fromisoformat(date)).days for date in newest)
