"""Baselines of a git revision, --fp8-baselines-from: those of the checkout do not count."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.sessions import FILE, update, with_baselines


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    return with_baselines(suite, monkeypatch)


def committed(suite, message="all"):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", message]):
        assert suite.run(*git, *arguments).ret == 0


def test_a_pull_request_does_not_bring_its_own_baselines(stored, monkeypatch):
    committed(stored)
    install(monkeypatch, H200, speedup=1.1)
    for file in (stored.path / "baselines/h200").glob("*.json"):
        file.unlink()
    assert stored.runpytest(*update("mine")).ret == 0
    only = ("-k", "test_speedup and rowwise")
    stored.runpytest("--fp8-gpu=h200", *only).assert_outcomes(passed=1, deselected=9)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-baselines-from=main", *only)
    result.assert_outcomes(failed=1, deselected=9)
    result.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*"])
    monkeypatch.setenv("PYTEST_FP8_BASELINES_FROM", "main")
    stored.runpytest("--fp8-gpu=h200", *only).assert_outcomes(failed=1, deselected=9)


def test_a_revision_without_the_case_s_file_is_one_error(stored):
    (stored.path / FILE).unlink()
    committed(stored)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-baselines-from=main")
    result.stdout.fnmatch_lines(["*baselines: those of git revision main"])
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no baseline for 1 case(s) on h200 at git revision main, so 2 question(s) *"])


@pytest.mark.parametrize(
    ("revision", "next_step"), [("main", "git log"), ("nowhere", "git branch"), ("--output=x", "git branch")]
)
def test_a_revision_without_baselines_is_a_usage_error_at_the_start(suite, monkeypatch, revision, next_step):
    install(monkeypatch, H200)
    committed(suite)
    result = suite.runpytest("--fp8-gpu=h200", f"--fp8-baselines-from={revision}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*baselines of * at git revision '{revision}' cannot be read", f"*next: *{next_step}*"]
    )
