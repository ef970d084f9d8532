"""Baselines that are missing, that no case has a use for, or that were taken another way."""

from __future__ import annotations

import re
import shutil

import pytest

from helpers.baselines import edit
from helpers.fakes import H200, SUITE, install
from helpers.sessions import FILE, with_baselines
from pytest_fp8.codes import R


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    return with_baselines(suite, monkeypatch)


def test_a_plain_run_in_ci_fails_where_nothing_is_stored(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["FP8-R46: no baseline for 2 case(s) on h200, so 4 question(s) compared with nothing; next: *"]
    )


def test_orphaned_and_unexercised_baselines_are_named_after_a_whole_run(stored, monkeypatch):
    folder = stored.path / "baselines/h200"
    (folder / "tiny-torchao-gone.json").write_text((stored.path / FILE).read_text())
    install(monkeypatch, H200, fails={"tiny-te-current": R.ARM_DIED})
    result = stored.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(
        [
            "1 orphaned baseline(s), of no case of this suite: tiny-torchao-gone",
            "1 unexercised baseline(s), asked nothing in this run: tiny-te-current",
        ]
    )


def test_a_whole_run_that_used_all_baselines_names_none(stored):
    result = stored.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=10)
    result.stdout.no_fnmatch_line("*orphaned*")
    result.stdout.no_fnmatch_line("*unexercised*")


def test_a_missing_baseline_is_said_outside_ci(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "rowwise")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["FP8-R46: no baseline for 1 case(s) on h200, so 2 question(s) *; next: *--fp8-update*"]
    )


def test_a_metric_that_was_removed_from_a_baseline_is_missing(stored, monkeypatch):
    edit(stored.path / FILE, lambda data: data["sessions"][0]["metrics"].pop("memory_ratio"))
    monkeypatch.setenv("CI", "true")
    result = stored.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FP8-R46: no baseline for 1 case(s) on h200, so 1 question(s) compared with nothing*"])


def test_an_obsolete_baseline_fails_in_ci(stored, monkeypatch):
    shutil.copy(stored.path / FILE, stored.path / "baselines/h200/tiny-torchao-gone.json")
    assert stored.runpytest("--fp8-gpu=h200").ret == 0
    monkeypatch.setenv("CI", "true")
    result = stored.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["1 orphaned baseline(s), *: tiny-torchao-gone", "  next: delete these files, or find*"]
    )


def test_figures_that_were_taken_another_way_are_gated_on_with_a_note(stored):
    edit(stored.path / FILE, lambda data: data["sessions"][0].update(measurement=1))
    result = stored.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=10)
    result.stdout.fnmatch_lines(["1 baseline(s) were gated on although *taken another way*: tiny-torchao-rowwise"])
    result.stdout.fnmatch_lines(["  next: pytest-fp8 suites -k tiny-torchao-rowwise --fp8-gpu=h200 *"])


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("metric", ["memory_ratio", "bf16_ms", "speedup"])
def test_no_number_in_a_baseline_fails_the_case_s_tests(stored, metric):
    text, found = re.subn(rf'("{metric}": [\[\s]+)[-0-9.e]+', r"\1NaN", (stored.path / FILE).read_text())
    assert found == 1
    (stored.path / FILE).write_text(text)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(passed=5, errors=5)
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json is not a readable baseline*", "*NaN is no number*"])
