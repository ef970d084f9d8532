"""Baselines as a reviewer names them: a folder, one file, or the folder at a git revision; and the suite's cases."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_fp8.baselines.store import Baseline, load_baseline, parse_text
from pytest_fp8.case import Case
from pytest_fp8.errors import BaselineError, SettingsError

Files = Mapping[Path, Baseline | BaselineError]
"""Path below the folder -> the baseline, or why it cannot be read."""


def read_folder(folder: Path) -> Files:
    """All baselines below a folder, or the one in a file. Raises :class:`BaselineError` where there is neither."""
    if folder.is_file():
        return {Path(folder.name): _read(folder)}
    if not folder.is_dir():
        raise BaselineError(
            f"{folder} is neither a folder of baselines nor one of them",
            expected="a folder like baselines/, with <gpu>/<case>.json in it, or one such file",
            seen="nothing there",
            next_step="name it with --dir, or run pytest with --fp8-report-dir to get candidates",
        )
    paths = sorted(path for path in folder.rglob("*.json") if not path.name.startswith("."))
    return {path.relative_to(folder): _read(path) for path in paths}


def read_revision(folder: Path, revision: str) -> Files:
    """The baselines of a folder as they were at a git revision. Raises :class:`BaselineError`."""
    where = folder if folder.is_dir() else folder.parent
    commit = _git(
        where, revision, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"
    ).strip()
    names = _git(where, revision, "ls-tree", "-r", "--name-only", commit, "--", "./").splitlines()
    files: dict[Path, Baseline | BaselineError] = {}
    for name in names:
        if not name.endswith(".json"):
            continue
        try:
            files[Path(name)] = parse_text(_git(where, revision, "show", f"{commit}:./{name}"), Path(name))
        except BaselineError as error:
            files[Path(name)] = error
    return files


def readable(files: Files) -> dict[tuple[str, str], Baseline]:
    """(GPU, case) -> baseline. Raises the :class:`BaselineError` of the first file that cannot be read."""
    found = {}
    for stored in files.values():
        if isinstance(stored, BaselineError):
            raise stored
        found[stored.gpu, stored.case] = stored
    return found


def suite_cases(path: Path) -> list[Case]:
    """The cases that a Python file defines: its attributes that are a :class:`Case` or a list or tuple of them.

    The file is run, so it is one to be trusted as the test suite is; its folder is importable meanwhile. Raises
    :class:`SettingsError`.
    """
    if not path.is_file():
        raise SettingsError(
            f"there is no suite at {path}",
            expected="the Python file that lists the cases",
            seen="no such file",
            next_step="name it: pytest-fp8 baselines check --suite path/to/matrix.py",
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
            f"the suite {path} defines no case",
            expected="attributes that are a pytest_fp8.Case, or a list or tuple of them",
            seen="none",
        )
    return list(cases.values())


def _read(path: Path) -> Baseline | BaselineError:
    try:
        return load_baseline(path)
    except FileNotFoundError:
        return BaselineError(f"{path} went away while it was read")
    except BaselineError as error:
        return error


def _git(folder: Path, revision: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_revision(folder, revision, str(error)) from error
    if done.returncode != 0:
        raise _no_revision(folder, revision, done.stderr.strip() or "no such revision")
    return done.stdout


def _no_revision(folder: Path, revision: str, why: str) -> BaselineError:
    return BaselineError(
        f"baselines of {folder} at git revision {revision!r} cannot be read",
        expected="a folder in a git repository, and a commit, branch or tag of it",
        seen=why,
        next_step=f"git -C {folder} log --oneline -- .",
    )
