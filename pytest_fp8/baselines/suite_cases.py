"""The cases of a suite: those that its Python file lists, and those that a GPU's folder of baselines is for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import B
from pytest_fp8.errors import SettingsError
from pytest_fp8.gpu import CHIP_OF_MAJOR, KINDS
from pytest_fp8.recipes import unmet_need

EMULATED = "emulated"
"""The folder of baselines that were measured without a GPU."""


def suite_cases(path: Path) -> list[Case]:
    """The cases that a Python file defines: its attributes that are a :class:`Case` or a list or tuple of them.

    The file is run, so trust it as you trust the test suite; its folder is importable meanwhile. Raises
    :class:`SettingsError`.
    """
    if not path.is_file():
        raise SettingsError(
            B.NO_SUITE,
            f"there is no suite at {path}",
            expected="the Python file that lists the cases",
            seen="no such file",
            next_step="name it: --suite path/to/matrix.py; where cases are marks of your own tests there is none, and "
            "files that nothing asks for are removed by hand (git rm)",
        )
    spec = importlib.util.spec_from_file_location("fp8_suite_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SettingsError(
            B.NO_SUITE,
            f"the suite {path} cannot be loaded",
            expected="a file that can be imported alone, such as suites/matrix.py",
            seen=f"{type(error).__name__}: {error}",
            next_step=f"python {path}",
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    cases: dict[str, Case] = {}
    for value in vars(module).values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Case):
                cases.setdefault(item.id, item)
    if not cases:
        raise SettingsError(
            B.NO_SUITE,
            f"the suite {path} defines no case",
            expected="attributes that are a pytest_fp8.Case, or a list or tuple of them",
            seen="none",
        )
    return list(cases.values())


def cases_for(cases: Iterable[Case], gpu: str) -> list[Case]:
    """The cases that a GPU's folder of baselines is for: those that it can run, or the emulated ones."""
    if gpu == EMULATED:
        return [case for case in cases if case.emulated]
    majors = [major for kind in KINDS if kind.name == gpu for major in kind.majors]

    def runs(case: Case) -> bool:
        # 8.9 is the least of Ada; of the others any minor number is as good.
        on = [major for major in majors if not unmet_need(case.backend, case.recipe, (major, 9))]
        return not majors or any(case.chip in ("", CHIP_OF_MAJOR[major]) for major in on)

    return [case for case in cases if not case.emulated and runs(case)]


def with_and_without_weights(cases: Iterable[Case]) -> dict[str, Case]:
    """The cases by id, and each as ``--fp8-weights`` would make it: a baseline of either belongs to the suite."""
    listed = list(cases)
    from_folder = [replace(case, weights="a folder") for case in listed if case.weights is None and case.model != OWN]
    return {case.id: case for case in [*listed, *from_folder]}
