"""git, for those that ask it: where a measurement comes from, and files as they were at a revision."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

SECONDS = 30
"""How long one question may take."""
REGULAR = ("100644", "100755")
"""git's modes of files that are neither links nor other repositories."""

OTHER_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
)
"""Variables that git sets for its hooks: they name the repository, and the index, of the command that runs them."""


class GitError(Exception):
    """git is not installed, took too long or refused; the text is its own."""


def git(folder: Path, *arguments: str, seconds: float = SECONDS, index: Path | None = None) -> str:
    """What ``git ARGUMENTS`` prints in ``folder``, within ``seconds``. ``index``: an index of one's own in place of the
    repository's. Raises :class:`GitError`."""
    env = {"GIT_INDEX_FILE": str(index)} if index else {}
    return _git(folder, *arguments, seconds=seconds, **env).decode(errors="backslashreplace")


def agrees(folder: Path, *arguments: str) -> bool:
    """Whether ``git ARGUMENTS`` ends well in ``folder``: how git answers yes or no."""
    with contextlib.suppress(GitError):
        git(folder, *arguments)
        return True
    return False


def commit_named(folder: Path, revision: str) -> str:
    """The hash of the commit that a revision names, in the repository of ``folder``. Raises :class:`GitError`."""
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError as error:
        if str(error):
            raise
        raise GitError(
            "no such revision: misspelt, or a shallow clone lacks it (git fetch --unshallow, or fetch-depth: 0 of "
            "actions/checkout)"
        ) from error


def committed(folder: Path, commit: str, below: str) -> dict[str, bytes]:
    """The files below a path (``./`` of ``folder``) at a commit: their path from ``folder`` -> their content; links and
    other repositories are left out. Raises :class:`GitError`."""
    listed = _git(folder, "ls-tree", "-r", "-z", commit, "--", below).decode(errors="surrogateescape")
    rows = (line.split("\t", 1) for line in listed.split("\0") if line)
    blobs = {name: facts.split()[2] for facts, name in rows if facts.startswith(REGULAR)}
    return {name: _git(folder, "cat-file", "blob", blob) for name, blob in blobs.items()}


def _git(folder: Path, *arguments: str, seconds: float = SECONDS, **env: str) -> bytes:
    inherited = {name: value for name, value in os.environ.items() if name not in OTHER_REPOSITORY}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=seconds,
            check=False,
            env={**inherited, "LC_ALL": "C", **env},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(str(error)) from error
    if done.returncode != 0:
        raise GitError(done.stderr.decode(errors="backslashreplace").strip())
    return done.stdout
