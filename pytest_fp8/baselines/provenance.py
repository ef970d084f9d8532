"""Where a measurement comes from: enough to judge it, and nothing about whose machine it was."""

from __future__ import annotations

import datetime
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_fp8.git import GitError, git
from pytest_fp8.libraries import library_versions

COMMIT_VARIABLES = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""Name the commit in a job whose files came without their git history."""
FALSE = ("", "0", "false", "no", "off")
CI_VARIABLES = ("CI", "TF_BUILD", "JENKINS_URL", "TEAMCITY_VERSION")
"""Services set ``CI``, but for Azure Pipelines (TF_BUILD), Jenkins and TeamCity."""


def ci_variable(environment: Mapping[str, str]) -> str:
    """The variable that says this is continuous integration, or an empty string. ``CI=false`` says that it is not."""
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in FALSE:
            return name
    return ""


@dataclass(frozen=True)
class Origin:
    """Where and with what a session measured."""

    date: str
    commit: str
    dirty: bool | None
    """Whether files of the checkout were changed; ``None``: not known."""
    reason: str
    gpu: Mapping[str, Any]
    libraries: Mapping[str, str]
    run: str
    """Random digits, the same for all cases of one session: sessions of one day and commit are told apart by it."""


def provenance(root: Path, gpu: dict[str, Any], reason: str, stored: Path | None = None) -> dict[str, Any]:
    """Date, commit, GPU, driver, libraries, Python, the reason given and random digits that name the session. Python's
    own library is the text that the zoo's models learn. No host name, user name, path or environment.

    ``stored``: the folder of baselines. It is left out of what git compares: its files change nothing that is measured,
    and the update before this one has rewritten some.
    """
    named = next((os.environ[name][:12] for name in COMMIT_VARIABLES if os.environ.get(name)), "")
    root, folder = root.resolve(), (stored or root).resolve()
    beside = [f":(exclude,literal){folder.relative_to(root).as_posix()}"] if root in folder.parents else []
    try:
        commit = git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = git(root, "status", "--porcelain", "--untracked-files=no", "--", ":/", *beside)
        dirty: bool | None = bool(changed.strip())
    except GitError:
        # Without a history there is no commit to compare the files with.
        commit, dirty = named, None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "dirty": dirty,
        "gpu": gpu,
        "libraries": {"python": platform.python_version(), **library_versions()},
        "reason": reason,
        "run": secrets.token_hex(6),
    }
