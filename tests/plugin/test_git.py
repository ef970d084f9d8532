"""What is read of a git repository: where a number comes from, with nothing about whose machine it was, and what is
told to do where git is missing, refuses or has not fetched what is asked for."""

import getpass
import json
import socket
import subprocess

import pytest

from pytest_fp8 import SettingsError
from pytest_fp8.arms.environment import checkout
from pytest_fp8.baselines.provenance import provenance
from pytest_fp8.git import GitError, commit_named

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]


def git(folder, *arguments):
    return subprocess.run([*GIT, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    return tmp_path


def commit(folder):
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all")


def dirty(root, stored):
    return provenance(root, {"name": "NVIDIA H200"}, "why", stored)["dirty"]


def test_without_a_history_the_commit_may_be_named_and_nothing_says_host_user_or_path(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    said = provenance(tmp_path, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"], said["reason"]) == ("0123456789ab", None, "why")
    for private in (socket.gethostname(), str(tmp_path), f'"{getpass.getuser()}"'):
        assert private not in json.dumps(said)


def test_a_history_goes_before_what_a_job_names(monkeypatch, repository):
    (repository / "train.py").write_text("1")
    commit(repository)
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    said = provenance(repository, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"]) == (git(repository, "rev-parse", "--short=12", "HEAD"), False)


@pytest.mark.parametrize("folder", [":!lines", "deep/er/baselines"])
def test_a_folder_of_baselines_may_have_any_name(repository, folder):
    (repository / folder).mkdir(parents=True)
    stored, code = repository / folder / "case.json", repository / "train.py"
    for path in (stored, code):
        path.write_text("1")
    commit(repository)
    stored.write_text("2")
    assert (dirty(repository, repository / folder), dirty(repository, None)) == (False, True)
    code.write_text("2")
    assert dirty(repository, repository / folder)


def test_what_git_itself_says_is_shown(pytester, monkeypatch):
    """Outside of a repository; on a machine without git; of a repository of another user, with git's own advice."""
    pytester.makepyfile("def test_nothing(): pass")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    for says in ("*not a git repository*", "*No such file or directory: 'git'*"):
        result = pytester.runpytest("--fp8-base=main")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([says])
        monkeypatch.setenv("PATH", str(pytester.path))


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
            commit(folder)
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    return folder


@pytest.mark.parametrize(("how", "name"), [(("--depth=1",), "mine~9"), ((), "mian"), ((), "--output=x"), ((), "")])
def test_a_revision_that_is_not_there_may_have_to_be_fetched(origin, how, name):
    git(origin.parent, "clone", "-q", *how, f"file://{origin}", "clone")
    with pytest.raises(GitError, match="no such revision: misspelt, or a shallow clone lacks it") as refused:
        commit_named(origin.parent / "clone", name)
    assert "git fetch --unshallow" in str(refused.value)


def test_what_a_shallow_clone_lacks_is_there_once_it_is_fetched(origin):
    git(origin.parent, "clone", "-q", "--depth=1", f"file://{origin}", "clone")
    clone = origin.parent / "clone"
    with pytest.raises(SettingsError, match="cannot be checked out"), checkout("HEAD~1", clone):
        pass
    git(clone, "fetch", "-q", "--unshallow")
    with checkout("HEAD~1", clone) as tree:
        assert (tree / "file").read_text() == git(origin, "show", "mine~1:file")
