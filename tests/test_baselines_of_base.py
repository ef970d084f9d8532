"""With --fp8-base the stored baselines are those of base: the change under test does not bring its own."""

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
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-base=main", *only)
    result.assert_outcomes(failed=1, deselected=9)
    result.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*", "*; stored baselines: its own"])


def test_a_case_that_base_has_no_baseline_of_is_said_to_have_none_there(stored):
    kept = (stored.path / FILE).read_bytes()
    (stored.path / FILE).unlink()
    committed(stored)
    (stored.path / FILE).write_bytes(kept)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-base=main")
    result.stdout.fnmatch_lines(["*no baseline for 1 case(s) on h200 at base main, so * question(s) *"])


def test_where_base_has_none_at_all_those_of_the_checkout_are_read(suite, monkeypatch):
    install(monkeypatch, H200)
    committed(suite)
    with_baselines(suite, monkeypatch)
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-base=main")
    result.stdout.fnmatch_lines(["*; stored baselines: those in baselines, since it has none there"])
    result.stdout.no_fnmatch_line("*no baseline for*")


def test_a_folder_outside_of_the_repository_is_read_as_it_is(stored, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "stored"
    (stored.path / "baselines").rename(elsewhere)
    committed(stored)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-base=main", f"--fp8-baselines={elsewhere}")
    result.stdout.no_fnmatch_line("*no baseline for*")
