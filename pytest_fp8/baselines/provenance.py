"""Where a measurement came from: enough to judge it, nothing about whose machine it was."""

from __future__ import annotations

import datetime
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchao", "transformer-engine", "transformers", "triton", "pytest-fp8")


def provenance(root: Path, gpu: dict[str, Any], reason: str) -> dict[str, Any]:
    """Date, commit, GPU, driver, libraries and the reason given. No host name, user name, path or environment."""
    history = _git(root, "rev-parse", "--short=12", "HEAD")
    # A runner that gets the tree without its history, or on top of another commit, names it in the environment.
    named = os.environ.get("PYTEST_FP8_COMMIT", "")
    known = bool(history) and named in ("", history)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": named or history,
        # None: nobody here can tell, for there is no history to compare with.
        "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no")) if known else None,
        "gpu": gpu,
        "libraries": library_versions(),
        "reason": reason,
    }


def library_versions() -> dict[str, str]:
    """Installed versions of what a measurement depends on; a package that is absent is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
