"""The figures that claims are held against: the suite's baselines, and those that only pages need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.claims.cases import ALL
from pytest_fp8.baselines.folder import read_folder, readable
from pytest_fp8.baselines.record import Baseline

BASELINES, MEASURED = Path("baselines"), Path("benchmarks/claims/measured")
SUITE = "pytest suites"
HERE = f"pytest benchmarks/claims/test_measure.py --fp8-baselines {MEASURED}"


def stored_on(gpu: str, folders: Iterable[Path]) -> dict[str, Baseline]:
    """The baselines of a GPU by case; the first folder that has a case counts. Raises :class:`BaselineError`."""
    found: dict[str, Baseline] = {}
    for folder in folders:
        for (key, case), baseline in readable(read_folder(folder)).items():
            if key == gpu:
                found.setdefault(case, baseline)
    return found


def measure(cases: Sequence[str], gpu: str, reason: str) -> str:
    """What measures these cases and stores them where they belong: with the suite's baselines, or here."""
    here = {case.id for case in ALL}
    # With the brackets of a test's name around it, an id does not also choose longer ids.
    chosen = {
        SUITE: " or ".join(f"[{case}]" for case in cases if case not in here),
        HERE: " or ".join(f"[{case}]" for case in cases if case in here),
    }
    return " && ".join(update(tests, names, gpu, reason) for tests, names in chosen.items() if names)


def update(tests: str, chosen: str, gpu: str, reason: str) -> str:
    """:data:`SUITE` or :data:`HERE` as an update of the cases that ``chosen`` names, as pytest's ``-k`` takes it."""
    return f'{tests} -k "{chosen}" --fp8-gpu={gpu} --fp8-update="{reason}"'
