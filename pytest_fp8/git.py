"""git, for the two that ask it: where a measurement comes from, and baselines as they were at a revision."""

from __future__ import annotations

import subprocess
from pathlib import Path

SECONDS = 30
"""How long one question may take."""


class GitError(Exception):
    """git is not installed, took too long or refused; the text is its own."""


def git(folder: Path, *arguments: str, seconds: float = SECONDS) -> str:
    """What ``git ARGUMENTS`` prints in ``folder``, within ``seconds``. Raises :class:`GitError`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitError(str(error)) from error
    if done.returncode != 0:
        raise GitError(done.stderr.strip())
    return done.stdout
