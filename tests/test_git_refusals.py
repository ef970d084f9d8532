"""What is told to do where git itself is missing, or refuses the repository whatever revision is asked for."""

import stat

import pytest

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
