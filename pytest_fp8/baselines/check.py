"""What is wrong with a folder of baselines beside the cases of its suite: unreadable, orphaned, redefined, and more."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fp8.baselines.metrics import lacking
from pytest_fp8.baselines.record import MEASUREMENT, Baseline
from pytest_fp8.baselines.store import Files, Source, gpus_in, measuring, misplaced
from pytest_fp8.case import OWN, Case
from pytest_fp8.ci import ci_variable
from pytest_fp8.codes import B, Code
from pytest_fp8.errors import BaselineError, SettingsError
from pytest_fp8.gpu import CHIP_OF_MAJOR, KINDS
from pytest_fp8.recipes import unmet_need
from pytest_fp8.stats.components import MEASURED, Components
from pytest_fp8.stats.looks import processes_hold

if TYPE_CHECKING:
    from pytest_fp8.report.record import Record

EMULATED = "emulated"
"""The folder of baselines that were measured without a GPU."""
NOTES = B.UNEXERCISED, B.INCOMPLETE, B.MEASURED_OTHERWISE
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
    files: Files,
    cases: Sequence[Case] | None,
    gpu: str = "",
    components: Callable[[str], Components] = lambda gpu: MEASURED,
) -> list[Note]:
    """Everything there is to say about ``files``.

    ``cases``: those of the suite; ``None`` where no list of them is known. ``gpu``: look at that one alone.
    ``components``: a GPU's variances.
    """
    found: list[Note] = []
    folders = {path.parts[0] if len(path.parts) > 1 else "" for path in files}
    for folder in [gpu] if gpu else sorted(folders):
        here = {path: each for path, each in files.items() if path.parts[:-1] == ((folder,) if folder else ())}
        known, variances = {case.id: case for case in cases_for(cases or (), folder)}, components(folder)
        for path, stored in sorted(here.items()):
            rows = _rows(path, stored, known.get(path.stem), cases is None, variances)
            found += [Note(code, folder, path.stem, message, step) for code, message, step in rows if message]
        if folder in gpus_in(files) or gpu:
            there, message = (
                {path.stem for path in here},
                "the suite defines this case and no baseline is stored for it",
            )
            found += [
                Note(B.UNEXERCISED, folder, name, message, f'{measuring(folder, name)}"first"')
                for name, case in known.items()
                if name not in there and case.backend != "bf16" and case.model != OWN
            ]
    return found


def _rows(
    path: Path, stored: Baseline | BaselineError, case: Case | None, unlisted: bool, components: Components
) -> list[tuple[Code, str, str]]:
    """What one file can have: code, message, empty where it has not, and next step. ``unlisted``: no list says which
    files are of a case."""
    fault = stored if isinstance(stored, BaselineError) else misplaced(path, stored)
    if fault or isinstance(stored, BaselineError):
        assert fault is not None
        return [(fault.code, fault.seen or fault.headline, f"restore {path} (git checkout), or delete it")]
    again = f'{measuring(stored.gpu, stored.case)}"..."'
    rows: list[tuple[Code, str, str]] = []
    if case is None and not unlisted and not of_own_model(stored.case):
        rows.append((B.ORPHANED, "the suite has no such case for this GPU", f"git rm {path}"))
    # The hash of an own model's case covers the user's functions, which are not loaded.
    if case is not None and case.model != OWN and case.digest() != stored.case_hash:
        message = f"measured for case hash {stored.case_hash}; the case is {case.digest()} today"
        rows.append((B.REDEFINED, message, again))
    if case is not None and (missing := lacking(case, stored.metrics)):
        rows.append((B.INCOMPLETE, f"its case asks for {', '.join(missing)}, and none is stored", again))
    # The speed of a case that is no longer asked for it gates nothing.
    if case is not None and case.asks("speedup") and stored.gated:
        coarse = too_coarse(stored.gated, stored.values(stored.gated), case.tolerance, components)
        rows.append((B.TOO_COARSE, coarse, again))
    if measured_otherwise(stored):
        message = f"figures were taken another way than today, which is measurement {MEASUREMENT}"
        rows.append((B.MEASURED_OTHERWISE, message, again))
    return rows


def of_own_model(name: str) -> bool:
    """Whether a baseline is of a user's model, named or not: its test defines it, which no suite needs to list."""
    return name.startswith((f"{OWN}-", f"{OWN}."))


@dataclass
class Presence:
    """Lines for the closing summary; ``problems`` fail the session."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def presence(record: Record, folder: Source, gpu: str) -> Presence:
    """What to say of the baselines of ``gpu`` in ``folder``, the checkout's, after a session. Orphaned ones fail it in
    continuous integration, where nobody reads notes."""
    found = Presence()
    if not record.partial:
        asked = {name for name, entry in record.entries.items() if entry.decisions}
        here = {path.stem for path in folder.names() if path.parts[:-1] == (gpu,)}
        if of_no_case := sorted(here - set(record.collected)):
            (found.problems if ci_variable(os.environ) else found.notes).extend(
                [
                    f"{len(of_no_case)} orphaned baseline(s), of no case of this suite: {', '.join(of_no_case)}",
                    "  next: delete these files, or find out which test was to ask them",
                ]
            )
        if not_asked := sorted((here & set(record.collected)) - asked):
            names = ", ".join(not_asked)
            found.notes.append(f"{len(not_asked)} unexercised baseline(s), asked nothing in this run: {names}")
    return found


def too_coarse(metric: str, values: Sequence[Sequence[float]], tolerance: float, components: Components) -> str:
    """Why a speedup of these log ratios cannot gate at ``tolerance``, or an empty string."""
    held = processes_hold(values, components, busy=metric == "busy_speedup")
    if held <= tolerance:
        return ""
    return f"its processes spread too much to gate at {tolerance:.1%}; they could hold {held:.1%}"


def measured_otherwise(stored: Baseline) -> bool:
    """Whether the newest session of a metric took its figures another way than today. Beside a newer one, older ones
    are sessions like others: an update would not take them out."""
    return any(stored.measured_in(name)[-1].measurement != MEASUREMENT for name in stored.metrics)


def suite_cases(path: Path) -> list[Case]:
    """The cases that a Python file defines: its attributes that are a :class:`Case` or a list or tuple of them.

    The file is run, so trust it as you trust the test suite; its folder is importable meanwhile. Raises
    :class:`SettingsError`.
    """
    sys.path.insert(0, str(path.parent))
    try:
        defined = runpy.run_path(str(path), run_name="fp8_suite_cases").values()
    except Exception as error:
        raise _no_suite(f"{type(error).__name__}: {error}", path) from error
    finally:
        sys.path.remove(str(path.parent))
    values = [each for value in defined for each in (value if isinstance(value, list | tuple) else [value])]
    cases = {each.id: each for each in values if isinstance(each, Case)}
    if not cases:
        raise _no_suite("no case in it", path)
    return list(cases.values())


def _no_suite(seen: str, path: Path) -> SettingsError:
    return SettingsError(
        B.NO_SUITE,
        f"the suite {path} gives no cases",
        expected="a Python file, such as suites/matrix.py, whose attributes are cases, or lists or tuples of them",
        seen=seen,
        next_step="name it: --suite path/to/matrix.py",
    )


def cases_for(cases: Iterable[Case], gpu: str) -> list[Case]:
    """The cases that a GPU's folder of baselines is for: those that it can run, or the emulated ones."""
    if gpu == EMULATED:
        return [case for case in cases if case.emulated]
    majors = KINDS.get(gpu, ())

    def runs(case: Case) -> bool:
        # 8.9 is the least of Ada; of the others any minor number is as good.
        on = [major for major in majors if not unmet_need(case.backend, case.recipe, (major, 9))]
        return not majors or any(case.chip in ("", CHIP_OF_MAJOR[major]) for major in on)

    return [case for case in cases if not case.emulated and runs(case)]
