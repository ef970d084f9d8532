"""What is wrong with a folder of baselines beside the cases of its suite: unreadable, orphaned, redefined, and more."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fp8.baselines.metrics import REQUIRED
from pytest_fp8.baselines.provenance import ci_variable
from pytest_fp8.baselines.record import MEASUREMENT, Baseline
from pytest_fp8.baselines.store import Files, Folder, baseline_path, estimated, measuring
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import B, Code
from pytest_fp8.errors import BaselineError, refuse
from pytest_fp8.gpu import CHIP_OF_MAJOR, KINDS
from pytest_fp8.recipes import unmet_need
from pytest_fp8.stats.components import Components
from pytest_fp8.stats.looks import processes_hold

if TYPE_CHECKING:
    from pytest_fp8.report.record import Record

EMULATED = "emulated"
"""The folder of baselines that were measured without a GPU."""
NOTES = B.UNEXERCISED, B.INCOMPLETE, B.MEASURED_OTHERWISE
"""Other codes are errors."""


@dataclass(frozen=True)
class Note:
    """One thing to know about a baseline; an error makes a check fail, a note (:data:`NOTES`) does not."""

    code: Code
    gpu: str
    case: str
    message: str
    next_step: str = ""

    @property
    def error(self) -> bool:
        return self.code not in NOTES


def inspect(files: Files, cases: Sequence[Case] | None) -> list[Note]:
    """Everything there is to say about ``files``. ``cases``: those of the suite; ``None`` where no list of them is
    known."""
    found: list[Note] = []
    for gpu in sorted({path.parts[0] for path in files}):
        here = {path: stored for path, stored in files.items() if path.parts[0] == gpu}
        known = {case.id: case for case in cases_for(cases or (), gpu)}
        components = estimated(here.values())
        for path, stored in here.items():
            # A user's model is defined by its test, which no suite needs to list.
            orphaned = path.stem not in known and cases is not None and not path.stem.startswith((f"{OWN}-", f"{OWN}."))
            for code, message, step in _said(path, stored, known.get(path.stem), orphaned, components):
                found.append(Note(code, gpu, path.stem, message, step))
        absent = "the suite defines this case and no baseline is stored for it"
        for name, case in known.items():
            if baseline_path(Path(), gpu, name) not in here and case.backend != "bf16" and case.model != OWN:
                found.append(Note(B.UNEXERCISED, gpu, name, absent, f'{measuring(gpu, name)}"first"'))
    return found


def _said(
    path: Path, stored: Baseline | BaselineError, case: Case | None, orphaned: bool, components: Components
) -> Iterator[tuple[Code, str, str]]:
    """Code, message and next step of what is to be said of one file."""
    if isinstance(stored, BaselineError):
        yield stored.code, stored.seen or stored.headline, f"restore {path} (git checkout), or delete it"
        return
    again = f'{measuring(stored.gpu, stored.case)}"..."'
    if orphaned:
        yield B.ORPHANED, "the suite has no such case for this GPU", f"git rm {path}"
    if case is not None:
        # The hash of an own model's case covers the user's functions, which are not loaded.
        if case.model != OWN and case.digest() != stored.case_hash:
            yield B.REDEFINED, f"measured for case hash {stored.case_hash}; the case is {case.digest()} today", again
        required = [name for question, names in REQUIRED.items() if case.asks(question) for name in names]
        if missing := [name for name in required if name not in stored.metrics]:
            yield B.INCOMPLETE, f"its case asks for {', '.join(missing)}, and none is stored", again
        # The speed of a case that is no longer asked for it gates nothing.
        if case.asks("speedup") and (coarse := too_coarse(stored, case.tolerance, components)):
            yield B.TOO_COARSE, coarse, again
    # Of the newest session of each metric: an update would not take out older ones.
    if any(stored.measured_in(name)[-1].measurement != MEASUREMENT for name in stored.metrics):
        message = f"figures were taken another way than today, which is measurement {MEASUREMENT}"
        yield B.MEASURED_OTHERWISE, message, again


def presence(record: Record, folder: Folder, gpu: str) -> tuple[list[str], list[str]]:
    """What to say of the baselines of ``gpu`` in ``folder``, the checkout's, after a session: problems, which fail it,
    and notes. Orphaned ones fail it in continuous integration, where nobody reads notes."""
    if record.partial:
        return [], []
    here, collected = {path.stem for path in folder.names() if path.parts[0] == gpu}, set(record.collected)
    asked = {
        name for name, row in record.entries.items() if any(said.verdict != "ERROR" for said in row.decisions.values())
    }
    problems: list[str] = []
    notes: list[str] = []
    if orphaned := sorted(here - collected):
        said = problems if ci_variable(os.environ) else notes
        said.append(f"{len(orphaned)} orphaned baseline(s), of no case of this suite: {', '.join(orphaned)}")
        said.append("  next: delete these files, or find out which test was to ask them")
    if idle := sorted((here & collected) - asked):
        notes.append(f"{len(idle)} unexercised baseline(s), asked nothing in this run: {', '.join(idle)}")
    return problems, notes


def too_coarse(baseline: Baseline, tolerance: float, components: Components) -> str:
    """Why the newest speedup of a baseline cannot gate at ``tolerance``, or an empty string."""
    values = baseline.values(baseline.gated) if baseline.gated else []
    held = processes_hold(values, components, busy=baseline.gated == "busy_speedup") if values else 0.0
    if held <= tolerance:
        return ""
    return f"its processes spread too much to gate at {tolerance:.1%}; they could hold {held:.1%}"


def suite_cases(path: Path) -> list[Case]:
    """The cases that a Python file defines: its attributes that are a :class:`Case` or a list or tuple of them.

    The file is run, so trust it as you trust the test suite; its folder is importable meanwhile. Raises
    :class:`SettingsError`.
    """
    seen = "no case in it"
    sys.path.insert(0, str(path.parent))
    try:
        defined = list(runpy.run_path(str(path), run_name="fp8_suite_cases").values())
    except Exception as error:
        defined, seen = [], f"{type(error).__name__}: {error}"
    finally:
        sys.path.remove(str(path.parent))
    values = [each for value in defined for each in (value if isinstance(value, list | tuple) else [value])]
    cases = {each.id: each for each in values if isinstance(each, Case)}
    if not cases:
        refuse(
            B.NO_SUITE,
            f"the suite {path} gives no cases",
            expected="a Python file, such as suites/matrix.py, whose attributes are cases, or lists or tuples of them",
            seen=seen,
            next_step="name it: --suite path/to/matrix.py",
        )
    return list(cases.values())


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
