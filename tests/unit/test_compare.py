"""Test sessions that hold the speed against base, ``--fp8-base``, with fake arms."""

from __future__ import annotations

import subprocess

import pytest

from helpers.fakes import H200, install
from pytest_fp8.codes import S
from pytest_fp8.compare import Comparison, with_base
from pytest_fp8.verdicts import Decision, Verdict


def git(folder, *commands):
    for command in commands:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command], check=True, cwd=folder)


FP8 = ("head", "fp8")
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


@pytest.fixture
def session(pytester, monkeypatch):
    """A session held against a base that is the same commit; fake arms tell the two sides apart by name."""
    pytester.makepyfile(IN_TESTS)
    git(pytester.path, ["init", "-q"], ["add", "*.py"], ["commit", "-qm", "base"])

    def call(*arguments, **world):
        install(monkeypatch, H200, **world)
        return pytester.runpytest("--fp8-gpu=h200", *(arguments or ("--fp8-base=HEAD",)))

    return call


def test_base_is_the_commit_that_its_name_meant_at_the_start_and_is_told(session, pytester):
    moves = "def test_a_colleague_pulls():\n    subprocess.run(['git', 'tag', '-f', 'base', 'HEAD'], check=True)\n"
    pytester.makepyfile(test_1_moves=f"import subprocess\n\n{moves}")
    git(pytester.path, ["tag", "base"])
    before = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=pytester.path, text=True).strip()
    git(pytester.path, ["commit", "-qm", "head", "--allow-empty"])
    result = session("--fp8-base=base")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"timed beside the base base: commit {before[:12]}; *", "*3 passed*"])


@pytest.mark.parametrize("strict", [False, True])
def test_a_base_that_no_test_asks_the_speed_of_is_noted(session, strict):
    result = session("--fp8-base=HEAD", "-k", "not speedup", *["--fp8-strict"] * strict)
    assert result.ret == strict
    says = "FP8-R48: nothing was timed beside the base HEAD: no test that ran asked assert_speedup(), *"
    result.stdout.fnmatch_lines([says, "*1 passed*"])


SLOWER = ["*FAIL FP8-S23: head is slower than base in FP8*", "*at most 1.0% slower than base's*"]


@pytest.mark.parametrize(
    ("world", "failed", "says"),
    [
        ({"slower": {FP8: 0.02}}, 1, SLOWER),
        ({"slower": {FP8: 0.005}}, 0, []),
        ({"slower": {("base", "fp8"): 0.06}}, 0, []),
        # A head without FP8 fails however fast.
        ({"slower": {("base", "fp8"): 0.06}, "executed_roles": ("fprop",)}, 2, ["*FAIL FP8-L*: in head *"]),
    ],
)
def test_a_test_session_fails_what_is_slower_than_base(session, world, failed, says):
    result = session(**world)
    result.assert_outcomes(passed=2 - failed, failed=failed)
    result.stdout.fnmatch_lines(says)


def test_the_stored_baseline_stays_behind_base_as_the_coarse_guard(session):
    assert session("--fp8-update=first").ret == 0
    crept = session("--fp8-base=HEAD", "-k", "speedup", speedup=1.05)
    crept.assert_outcomes(failed=1, deselected=1)
    crept.stdout.fnmatch_lines(["*FAIL FP8-S03: FP8 lost speed against BF16 since the baseline*"])


@pytest.mark.parametrize(("code", "verdict"), [(S.OTHER_REFERENCE, Verdict.PASS), (S.OTHER_PROCESS, Verdict.INVALID)])
def test_on_another_host_the_comparison_with_base_answers_alone(code, verdict):
    stored = Decision(code, Verdict.INVALID, "why", question="speedup")
    compared = Comparison(Decision(None, Verdict.PASS, "as fast as base's", question="same session"))
    assert with_base(stored, compared).verdict is verdict
