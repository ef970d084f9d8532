"""Baselines as a reviewer names them: a folder, one file, or the folder as it was at a git revision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_fp8.baselines.store import Baseline, load_baseline, parse_text
from pytest_fp8.errors import BaselineError
from pytest_fp8.git import GitError, git

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
    paths = sorted(path for path in folder.rglob("*.json") if path.name[0] not in "._")
    return {path.relative_to(folder): _read(path) for path in paths}


def read_revision(folder: Path, revision: str) -> Files:
    """The baselines of a folder as they were at a git revision. Raises :class:`BaselineError`."""
    where = folder if folder.is_dir() else folder.parent
    try:
        verify = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        commit = git(where, *verify).strip()
        names = git(where, "ls-tree", "-r", "--name-only", commit, "--", "./").splitlines()
        names = [name for name in names if name.endswith(".json") and Path(name).name[0] not in "._"]
        texts = {Path(name): git(where, "show", f"{commit}:./{name}") for name in names}
    except GitError as error:
        raise BaselineError(
            f"baselines of {where} at git revision {revision!r} cannot be read",
            expected="a folder in a git repository, and a commit, branch or tag of it",
            seen=str(error) or "no such revision",
            next_step=f"git -C {where} log --oneline -- .",
        ) from error
    files: dict[Path, Baseline | BaselineError] = {}
    for name, text in texts.items():
        try:
            files[name] = parse_text(text, name)
        except BaselineError as error:
            files[name] = error
    return files


def readable(files: Files) -> dict[tuple[str, str], Baseline]:
    """(GPU, case) -> baseline. Raises the :class:`BaselineError` of the first file that cannot be read."""
    found = {}
    for stored in files.values():
        if isinstance(stored, BaselineError):
            raise stored
        found[stored.gpu, stored.case] = stored
    return found


def _read(path: Path) -> Baseline | BaselineError:
    try:
        return load_baseline(path)
    except FileNotFoundError:
        return BaselineError(f"{path} was deleted while it was read")
    except BaselineError as error:
        return error
