"""The commit that a git revision names; of one that a clone does not have, the command that fetches it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from pytest_fp8.git import GitError, agrees, git

PLAIN = re.compile(r"\w[\w./-]*")
"""A branch's name that no shell reads otherwise."""
HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
FROM_A_BRANCH = re.compile(r"[~^@:]")
"""What follows a name where git is to go on from it: main~3, main@{yesterday}."""
OF_REFS = "refs/heads/", "refs/remotes/", "remotes/"
LISTS = "git branch --all; git tag"
SHALLOW = "it may not have been fetched: this is a shallow clone"


def commit_named(folder: Path, revision: str) -> str:
    """The hash of the commit that a revision names, in the repository of ``folder``. Raises :class:`GitError`, with the
    command that fetches what this clone may lack."""
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError as error:
        if str(error):
            raise
        raise GitError("no such revision", *_not_fetched(folder, revision)) from error


def _not_fetched(folder: Path, revision: str) -> tuple[str, str]:
    """What to do, and why the revision may be missing; the latter is empty where nothing speaks for a cause. What
    continuous integration clones has few commits, or one branch."""
    remotes = git(folder, "remote").split()
    name = _without_refs(FROM_A_BRANCH.split(revision)[0])
    goes_on = name != _without_refs(revision)
    remote = max((each for each in remotes if name.startswith(f"{each}/")), key=len, default="")
    usual = remote or ("origin" if "origin" in remotes else next(iter(remotes), ""))
    branch = name.removeprefix(f"{remote}/") if remote else name
    shallow = git(folder, "rev-parse", "--is-shallow-repository").strip() == "true"
    if name in ("HEAD", "@", ""):
        return ("git fetch --unshallow", SHALLOW) if shallow and goes_on else (LISTS, "")
    theirs, mine = f"refs/remotes/{usual}/{branch}", f"refs/heads/{branch}"
    there = [agrees(folder, "show-ref", "--verify", "--quiet", ref) for ref in (theirs, mine)]
    if not remote and usual and there == [True, False]:
        return f"name {usual}/{revision} instead", f"this clone has no branch {branch} of its own"
    lacks_some = shallow or "*" not in _refspec(folder, usual)
    cause = SHALLOW if shallow else "it may not have been fetched: this is a clone of one branch"
    depth = _depth(folder, goes_on) if shallow else ""
    if usual and HASH.fullmatch(revision):
        return f"git fetch {depth}{usual} {revision}", cause if lacks_some else ""
    if remote and branch == "HEAD":
        return f"git remote set-head {remote} --auto", "no branch is noted as the remote's own"
    if (remote or (lacks_some and usual)) and _is_branch_name(folder, branch):
        fetch = f"git fetch {depth}{usual} +refs/heads/{branch}:refs/remotes/{usual}/{branch}"
        return fetch + ("" if remote else f", then name {usual}/{revision} instead"), cause if lacks_some else ""
    return ("git fetch --unshallow" if shallow and goes_on else LISTS), cause if lacks_some and usual else ""


def _without_refs(name: str) -> str:
    return next((name.removeprefix(each) for each in OF_REFS if name.startswith(each)), name)


def _depth(folder: Path, goes_on: bool) -> str:
    """The option with which a shallow clone fetches. A depth would cut off history that the clone has."""
    if goes_on:
        return "--unshallow "
    alone = git(folder, "rev-list", "--count", "--all").strip() == "1"
    return "--depth=1 " if alone else ""


def _refspec(folder: Path, remote: str) -> str:
    """Which branches a fetch from the remote brings."""
    with suppress(GitError):
        return git(folder, "config", "--get-all", f"remote.{remote}.fetch")
    return ""


def _is_branch_name(folder: Path, name: str) -> bool:
    return PLAIN.fullmatch(name) is not None and agrees(folder, "check-ref-format", f"refs/heads/{name}")
