"""What is told to do where git itself is missing, refuses the repository whatever revision is asked for, or has not
fetched what is asked for."""

import shlex
import stat
import subprocess

import pytest

from pytest_fp8 import SettingsError
from pytest_fp8.arms.environment import checkout
from pytest_fp8.git import GitError
from pytest_fp8.revisions import commit_named

DUBIOUS = """#!/bin/sh
cat >&2 <<END
fatal: detected dubious ownership in repository at '/work/project'
To add an exception for this directory, call:

	git config --global --add safe.directory /work/project
END
exit 128
"""
TEST = "def test_nothing(): pass"


@pytest.fixture
def path(pytester, monkeypatch):
    """The one folder that programs are looked for in."""
    folder = pytester.mkdir("programs")
    monkeypatch.setenv("PATH", str(folder))
    pytester.makepyfile(TEST)
    return folder


@pytest.mark.parametrize("option", ["--fp8-baselines-from=main", "--fp8-base-git=main"])
def test_a_repository_of_another_user_is_to_be_trusted_and_not_fetched(pytester, path, option):
    (path / "git").write_text(DUBIOUS.replace("cat", "/bin/cat"))
    (path / "git").chmod(stat.S_IRWXU)
    result = pytester.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*next: *git config --global --add safe.directory /work/project"])
    result.stderr.no_fnmatch_line("*git fetch*")


@pytest.mark.parametrize("option", ["--fp8-baselines-from=main", "--fp8-base-git=main"])
def test_outside_of_a_repository_the_project_s_checkout_is_named_and_nothing_to_fetch(pytester, monkeypatch, option):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    pytester.makepyfile(TEST)
    result = pytester.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*next: *run this in the project's checkout*"])
    result.stderr.no_fnmatch_line("*git fetch*")


@pytest.mark.parametrize("option", ["--fp8-baselines-from=main", "--fp8-base-git=main"])
def test_a_machine_without_git_is_to_get_it(pytester, path, option):
    result = pytester.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*next: *install git*"])
    result.stderr.no_fnmatch_line("*not fetched*")


GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]


def git(folder, *arguments):
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def origin(tmp_path):
    """A repository with two commits on each of two branches, as a server has it."""
    folder = tmp_path / "origin"
    folder.mkdir()
    git(folder, "init", "-q")
    for branch in ("release/2", "mine"):
        git(folder, "checkout", "-q", "--orphan", branch)
        for number in range(2):
            (folder / "file").write_text(f"{branch} {number}")
            git(folder, "add", ".")
            git(folder, "commit", "-qm", f"{branch} {number}")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    return folder


def clone_of(origin, *how):
    git(origin.parent, "clone", "-q", *how, f"file://{origin}", "clone")
    return origin.parent / "clone"


def followed(clone, revision):
    """The revision once the next step is done, as the message gives both."""
    with pytest.raises(SettingsError, match="cannot be checked out") as refused, checkout(revision, clone):
        pass
    assert "no such revision" in refused.value.seen
    command, _, name = refused.value.next_step.removesuffix(" instead").partition(", then name ")
    if command.startswith("name "):
        return refused.value.cause, command.removeprefix("name ")
    git(clone, *shlex.split(command)[1:])
    return refused.value.cause, name or revision


SHALLOW, ONE_BRANCH = ("--depth=1",), ("--single-branch",)


@pytest.mark.parametrize(
    ("how", "revision", "wanted"),
    [
        *((how, name, "release/2") for how in (SHALLOW, ONE_BRANCH) for name in ("origin/release/2", "release/2")),
        *((how, "refs/remotes/origin/release/2", "release/2") for how in (SHALLOW, ONE_BRANCH)),
        *((how, "remotes/origin/release/2~1", "release/2~1") for how in (SHALLOW, ONE_BRANCH)),
        *((how, "a hash", "release/2") for how in (SHALLOW, ONE_BRANCH)),
        (SHALLOW, "HEAD~1", "mine~1"),
        (SHALLOW, "mine~1", "mine~1"),
        (SHALLOW, "origin/mine~1", "mine~1"),
        ((), "release/2", "release/2"),
    ],
)
def test_what_a_clone_lacks_is_there_once_the_next_step_is_done(origin, how, revision, wanted):
    """As the clones of continuous integration, which have one commit, or one branch."""
    clone, commit = clone_of(origin, *how), git(origin, "rev-parse", wanted)
    cause, name = followed(clone, commit if revision == "a hash" else revision)
    assert {SHALLOW: "shallow", ONE_BRANCH: "clone of one branch", (): "no branch release/2"}[how] in cause
    with checkout(name, clone) as tree:
        assert (tree / "file").read_text() == git(origin, "show", f"{commit}:file")


def test_history_that_a_shallow_clone_has_stays(origin):
    git(origin, "checkout", "-q", "-B", "main", "mine~1")
    git(origin, "checkout", "-q", "mine")
    clone = clone_of(origin, "--depth=2", "-b", "mine")
    _, name = followed(clone, "origin/main")
    assert git(clone, "rev-parse", name) == git(clone, "rev-parse", "HEAD~1")


def test_another_remote_is_asked_for_what_is_its_own(origin):
    clone = clone_of(origin, *ONE_BRANCH)
    fork = origin.parent / "fork"
    git(origin.parent, "clone", "-q", f"file://{origin}", "fork")
    git(fork, "checkout", "-q", "-b", "theirs")
    git(fork, "commit", "-q", "--allow-empty", "-m", "of the fork")
    git(clone, "remote", "add", "a/fork", f"file://{fork}")
    _, name = followed(clone, "a/fork/theirs")
    assert git(clone, "rev-parse", name) == git(fork, "rev-parse", "theirs")
    _, name = followed(clone, git(origin, "rev-parse", "release/2"))
    assert git(clone, "rev-parse", name) == git(origin, "rev-parse", "release/2")
    git(clone, "symbolic-ref", "--delete", "refs/remotes/origin/HEAD")
    _, name = followed(clone, "origin/HEAD")
    assert git(clone, "rev-parse", name) == git(origin, "rev-parse", "mine")


def test_a_name_that_nobody_has_is_looked_for_among_those_that_are_there(origin):
    clone = clone_of(origin)
    for name in (
        "mian",
        "origin/main; rm -r x",
        "origin/main..mine",
        "origin/x.lock",
        "--output=x",
        "v1",
        ":/words",
        "",
    ):
        with pytest.raises(GitError, match="no such revision") as refused:
            commit_named(clone, name)
        assert (refused.value.next_step, refused.value.cause) == ("git branch --all; git tag", "")


def test_files_that_cannot_be_written_are_no_revision_that_is_missing(origin):
    """A filter of the repository that is not installed here, as git's large file storage."""
    (origin / ".gitattributes").write_text("file filter=large\n")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "large files")
    git(origin, "config", "filter.large.smudge", "there-is-no-such-program smudge")
    git(origin, "config", "filter.large.required", "true")
    said = "the files of git revision 'HEAD' cannot be written to a temporary folder"
    with pytest.raises(SettingsError, match=said) as refused, checkout("HEAD", origin):
        pass
    assert "there-is-no-such-program" in refused.value.seen
    assert refused.value.next_step == "git worktree add --detach FOLDER HEAD, to see it by hand"
