"""Where a measurement comes from: enough to judge it, and nothing about whose machine it was."""

from __future__ import annotations

import datetime
import os
import platform
import secrets
from pathlib import Path
from typing import Any

from pytest_fp8.git import GitError, git
from pytest_fp8.libraries import library_versions

COMMIT_VARIABLES = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""Name the commit in a job whose files came without their git history."""


def provenance(root: Path, gpu: dict[str, Any], reason: str, stored: Path | None = None) -> dict[str, Any]:
    """Date, commit, GPU, driver, libraries, Python, the reason given and random digits that name the session. Python's
    own library is the text that the zoo's models learn. No host name, user name, path or environment. ``stored``: the
    folder of baselines."""
    history = _git_or_none(root, "rev-parse", "--short=12", "HEAD")
    named = next((os.environ[name][:12] for name in COMMIT_VARIABLES if os.environ.get(name)), "")
    # None: without a history there is no commit to compare the files with.
    changes = None
    if history:
        changes = _git_or_none(
            root, "status", "--porcelain", "--untracked-files=no", "--", ":/", *_beside(root, stored)
        )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": history or named,
        "dirty": None if changes is None else bool(changes),
        "gpu": gpu,
        "libraries": {"python": platform.python_version(), **library_versions()},
        "reason": reason,
        "run": secrets.token_hex(6),
    }


def _beside(root: Path, stored: Path | None) -> list[str]:
    """Leaves the baselines out of what git compares: they change nothing that is measured, and the update before this
    one has rewritten some."""
    root, folder = root.resolve(), (stored or root).resolve()
    # A folder that is the project, or holds it, would leave out the code, too.
    if folder == root or root not in folder.parents:
        return []
    return [f":(exclude,literal){folder.relative_to(root).as_posix()}"]


def _git_or_none(root: Path, *arguments: str) -> str | None:
    """What git prints, without the line's end; ``None`` where it cannot tell."""
    try:
        return git(root, *arguments).strip()
    except GitError:
        return None
