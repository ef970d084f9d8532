"""Test sessions that hold the speed against base, with fake arms."""

from __future__ import annotations

import subprocess

from helpers.fakes import H200, install
from pytest_fp8.codes import S
from pytest_fp8.compare.session import Comparison, with_base
from pytest_fp8.verdicts import Decision, Verdict

IN_TESTS = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("1b", "torchao", "tensorwise")], question="speedup")
    def test_speedup(fp8_pair):
        fp8_pair.assert_speedup()

    @pytest.mark.fp8(cases=[Case("1b", "torchao", "tensorwise")], question="layers")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""


GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]


def in_tests(pytester, monkeypatch, *arguments, **world):
    """A session held against a base that is the same commit; fake arms tell the two sides apart by name."""
    install(monkeypatch, H200, **world)
    pytester.makepyfile(IN_TESTS)
    if not (pytester.path / ".git").exists():
        for command in (["init", "-q"], ["add", "*.py"], ["commit", "-qm", "base"]):
            subprocess.run([*GIT, *command], check=True, cwd=pytester.path)
    return pytester.runpytest("--fp8-gpu=h200", "--fp8-base=HEAD", *arguments)


def test_base_is_the_commit_that_its_name_meant_at_the_start_and_is_told(pytester, monkeypatch):
    moves = "def test_a_colleague_pulls():\n    subprocess.run(['git', 'tag', '-f', 'base', 'HEAD'], check=True)\n"
    pytester.makepyfile(test_1_moves=f"import subprocess\n\n{moves}", test_2_asks=IN_TESTS)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"], ["tag", "base"]):
        subprocess.run([*GIT, *command], check=True, cwd=pytester.path)
    before = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=pytester.path, text=True).strip()
    subprocess.run([*GIT, "commit", "-qm", "head", "--allow-empty"], check=True, cwd=pytester.path)
    install(monkeypatch, H200)
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-base=base")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"timed beside the base base: commit {before[:12]}; *", "*3 passed*"])


def test_a_base_that_no_test_asks_the_speed_of_is_noted(pytester, monkeypatch):
    result = in_tests(pytester, monkeypatch, "-k", "not speedup")
    assert result.ret == 0
    says = "FP8-R48: nothing was timed beside the base HEAD: no test that ran asked assert_speedup(), *"
    result.stdout.fnmatch_lines([says, "*1 passed*"])
    strict = in_tests(pytester, monkeypatch, "-k", "not speedup", "--fp8-strict")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines([says, "*1 passed*"])


def test_a_test_session_fails_what_is_slower_than_base(pytester, monkeypatch):
    slower = in_tests(pytester, monkeypatch, slower={("head", "fp8"): 0.02})
    slower.assert_outcomes(passed=1, failed=1)
    slower.stdout.fnmatch_lines(
        ["*FAIL FP8-S23: head is slower than base in FP8*", "*at most 1.0% slower than base's*"]
    )


def test_the_stored_baseline_stays_behind_base_as_the_coarse_guard(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(IN_TESTS)
    assert pytester.runpytest("--fp8-gpu=h200", "--fp8-update=first").ret == 0
    crept = in_tests(pytester, monkeypatch, "-k", "speedup", speedup=1.05)
    crept.assert_outcomes(failed=1, deselected=1)
    crept.stdout.fnmatch_lines(["*FAIL FP8-S03: FP8 lost speed against BF16 since the baseline*"])


def test_on_another_host_the_comparison_with_base_answers_alone():
    def stored(code):
        return Decision(code, Verdict.INVALID, "why", question="speedup")

    compared = Comparison("a", Decision(None, Verdict.PASS, "as fast as base's", question="same session"))
    assert with_base(stored(S.OTHER_REFERENCE), compared).verdict is Verdict.PASS
    assert with_base(stored(S.OTHER_PROCESS), compared).verdict is Verdict.INVALID
