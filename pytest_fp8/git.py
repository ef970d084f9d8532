"""git, for those that ask it: where a measurement comes from, and files as they were at a revision."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

SECONDS = 30
"""How long one question may take."""
LARGEST = 1 << 20
"""Bytes of the largest file that :func:`committed` reads."""
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

INSTALL = "install git, or put its folder into PATH; git --version"
TRUST = "safe.directory "
"""What git says of a repository that another user owns, in every language."""
PLAIN = re.compile(r"\w[\w./-]*")
"""A branch's name that no shell reads otherwise, with none of the signs by which git names its ancestors."""
HASH = re.compile(r"[0-9a-f]{40}")
OUTSIDE = "not a git repository"
"""What git says of a folder that is in none, in English."""


class GitError(Exception):
    """git is not installed, took too long or refused; the text is its own. ``next_step``: what helps in any case that
    no other revision would; empty for all else. ``cause``: where one is known."""

    def __init__(self, said: str, next_step: str = "", cause: str = "") -> None:
        super().__init__(said)
        self.next_step = next_step
        self.cause = cause


def git(folder: Path, *arguments: str, seconds: float = SECONDS, index: Path | None = None) -> str:
    """What ``git ARGUMENTS`` prints in ``folder``, within ``seconds``. ``index``: an index of one's own in place of the
    repository's. Raises :class:`GitError`."""
    env = {"GIT_INDEX_FILE": str(index)} if index else {}
    return _git(folder, *arguments, seconds=seconds, env=env).decode(errors="backslashreplace")


def commit_named(folder: Path, revision: str) -> str:
    """The hash of the commit that a revision names, in the repository of ``folder``. Raises :class:`GitError`, with the
    command that fetches what this clone does not have."""
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError as error:
        if str(error):
            raise
        raise GitError("no such revision", *_not_fetched(folder, revision)) from error


def _not_fetched(folder: Path, revision: str) -> tuple[str, str]:
    """The command that fetches a revision that a clone may lack, or shows which ones it has, and why it lacks it, empty
    where that is not known. What continuous integration clones has one commit of one branch."""
    shallow = git(folder, "rev-parse", "--is-shallow-repository").strip() == "true"
    one, why = ("--depth=1 ", "a shallow clone, as continuous integration makes it") if shallow else ("", "")
    remotes = git(folder, "remote").split()
    remote, _, branch = revision.partition("/")
    if remote in remotes and PLAIN.fullmatch(branch):
        fetch = f"git fetch {one}{remote} +refs/heads/{branch}:refs/remotes/{revision}"
        return fetch, why or f"a clone of one branch, or no branch {branch!r} at {remote!r}"
    if remotes and HASH.fullmatch(revision):
        return f"git fetch {one}{remotes[0]} {revision}", why or "a commit of no branch that was fetched"
    return "git fetch --unshallow" if shallow else "git branch --all; git tag", why


def committed(folder: Path, commit: str, below: str) -> dict[str, bytes | str]:
    """The files below a path (``./`` of ``folder``) at a commit: their path from ``folder`` -> their content, or why it
    is not read. Two questions to git, however many files there are. Raises :class:`GitError`."""
    listed = _git(folder, "ls-tree", "-r", "-z", "-l", commit, "--", below).decode(errors="surrogateescape")
    found: dict[str, bytes | str] = {}
    wanted: list[tuple[str, str]] = []
    for line in filter(None, listed.split("\0")):
        facts, name = line.split("\t", 1)
        mode, _, blob, size = facts.split()
        if mode not in REGULAR:
            found[name] = "not a regular file"
        elif int(size) > LARGEST:
            found[name] = f"larger than {LARGEST} bytes"
        else:
            wanted.append((name, blob))
    answer = _git(folder, "cat-file", "--batch", said="".join(f"{blob}\n" for _, blob in wanted).encode())
    found |= zip((name for name, _ in wanted), _blobs(answer), strict=True)
    return found


def _blobs(answer: bytes) -> Iterator[bytes]:
    """The contents in what ``git cat-file --batch`` answers: ``<id> blob <size>``, the content and a newline each."""
    start = 0
    while start < len(answer):
        end = answer.index(b"\n", start)
        size = int(answer[start:end].split()[2])
        yield answer[end + 1 : end + 1 + size]
        start = end + 1 + size + 1


def _git(
    folder: Path,
    *arguments: str,
    seconds: float = SECONDS,
    said: bytes = b"",
    env: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    inherited = {name: value for name, value in os.environ.items() if name not in OTHER_REPOSITORY}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            input=said,
            capture_output=True,
            timeout=seconds,
            check=False,
            env={**inherited, **env},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        missing = isinstance(error, FileNotFoundError)
        raise GitError(str(error), INSTALL if missing else "") from error
    if done.returncode != 0:
        refusal = done.stderr.decode(errors="backslashreplace").strip()
        outside = f"run this in the project's checkout: {folder} is in none" if OUTSIDE in refusal else ""
        # In a container whose user is not the one who checked the project out git ends with the command that helps.
        raise GitError(refusal, next((line.strip() for line in refusal.splitlines() if TRUST in line), outside))
    return done.stdout
