"""Base against head with fake arms: ``pytest-fp8 compare`` and test sessions with ``--fp8-base``."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8.cli import main
from pytest_fp8.codes import R, S
from pytest_fp8.compare.session import Comparison, with_base
from pytest_fp8.stats.looks import BESIDE
from pytest_fp8.verdicts import Decision, Verdict

SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "tensorwise"), Case("8b", "torchao", "tensorwise")]
EMULATED = [Case("tiny", "torchao", "tensorwise", emulated=True)]
"""
CASE, OTHER_CASE = ("--case", "1b-torchao-tensorwise"), ("--case", "8b-torchao-tensorwise")


def git(folder, *commands):
    for command in commands:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command], check=True, cwd=folder)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    # Of this package's own commits the suite's models can be compared.
    (tmp_path / "pytest_fp8/compare").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    git(tmp_path, ["init", "-q"], ["add", "."], ["commit", "-qm", "base"])

    def call(*arguments, gpu=H200, **world):
        """Exit code, and what is said of base and head on both streams."""
        install(monkeypatch, gpu, **world)
        code = main(["compare", "--base-git", "HEAD", *arguments])
        return code, "".join(capsys.readouterr())

    return call


def test_two_equal_sides_pass_with_one_row_per_arm(run):
    code, said = run(*CASE)
    assert code == 0
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("1b-torchao-tensorwise  ")]
    assert [row[1] for row in rows] == ["fp8", "bf16"]
    assert rows[0][-1] == "PASS"


def test_sides_that_take_turns_are_built_three_times_for_each_pair(run):
    assert run(*OTHER_CASE, "--fp8-only", gpu=H100)[0] == 0
    sides = [process.side for process in FakeProcess.world.processes if process.spec is not None]
    # Both at once, then one after the other, then in turns.
    first = ["base", "head", "head", "head", "base"]
    assert sides == first + ["base", "head", "base"] * (BESIDE.pairs[0] - 1), "seen once both are there"


FP8, BF16 = ("head", "fp8"), ("head", "bf16")


@pytest.mark.parametrize(
    ("arguments", "world", "code", "says"),
    [
        (CASE, {"slower": {FP8: 0.06}}, 1, "is FP8's own"),
        (CASE, {"slower": {FP8: 0.06, BF16: 0.06}}, 1, "common to both precisions, not FP8's own"),
        (CASE, {"slower": {("base", "fp8"): 0.06}}, 0, "PASS: head's FP8 step is faster than base's"),
        (CASE, {"slower": {BF16: 0.06}}, 0, "PASS: head's FP8 step is "),
        (CASE, {"slower": {FP8: 0.005}}, 0, "PASS: head's FP8 step is slower than base's, within the tolerance"),
        ((*CASE, "--fp8-only"), {"slower": {FP8: 0.015}}, 1, "at most 1.0% slower"),
        ((*CASE, "--tolerance=0.02", "--fp8-only"), {"slower": {FP8: 0.01}}, 0, "PASS"),
        (CASE, {"strangers": (4242,)}, 2, "INVALID FP8-S13: another process used the GPU"),
        # A head without FP8 fails however fast.
        (CASE, {"executed_roles": ("fprop",)}, 1, "FAIL FP8-L"),
        # What was measured before an arm died is told.
        ((*CASE, *OTHER_CASE), {"fails": {"8b-torchao-tensorwise": R.ARM_DIED}}, 2, "1b-torchao-tensorwise: PASS"),
        (("--workload=my_project:workload", "--case=own-torchao-tensorwise"), {}, 0, "own-torchao-tensorwise: PASS"),
        # What cannot be compared.
        (CASE, {"gpu": None}, 2, "expected: a GPU"),
        (("--case", "tiny-torchao-tensorwise-emulated"), {}, 2, "emulated on the CPU"),
        (("--base-git", "", *CASE), {}, 2, "one is given and empty"),
        (("--head-git", "", *CASE), {}, 2, "one is given and empty"),
        (("--case", "9b"), {}, 2, "expected: 1b-torchao-tensorwise"),
        ((*CASE, "--tolerance=2"), {}, 2, "between 0 and 1"),
        ((*CASE, "--head-git=no-such-branch"), {}, 2, "cannot be checked out"),
        ((*CASE, "--workload=no_colon"), {}, 2, "does not name a workload"),
        ((*CASE, "--workload=a:b"), {}, 2, "own-bf16, own-torchao-tensorwise, "),
    ],
)
def test_exit_codes_and_what_is_said(run, arguments, world, code, says):
    seen, said = run(*arguments, **world)
    assert says in said
    assert seen == code


def test_two_commits_are_compared_with_a_model_of_their_own(run):
    shutil.rmtree("pytest_fp8")
    code, said = run(*CASE)
    assert code == 2
    assert "models of the suite are pytest-fp8's own" in said
    assert "`--workload module:name" in said


# -- test sessions that hold the speed against base ------------------------------------------------------------------

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


def test_a_test_session_fails_what_is_slower_than_base(session):
    slower = session(slower={FP8: 0.02})
    slower.assert_outcomes(passed=1, failed=1)
    says = ["*FAIL FP8-S23: head is slower than base in FP8*", "*at most 1.0% slower than base's*"]
    slower.stdout.fnmatch_lines(says)


def test_the_stored_baseline_stays_behind_base_as_the_coarse_guard(session):
    assert session("--fp8-update=first").ret == 0
    crept = session("--fp8-base=HEAD", "-k", "speedup", speedup=1.05)
    crept.assert_outcomes(failed=1, deselected=1)
    crept.stdout.fnmatch_lines(["*FAIL FP8-S03: FP8 lost speed against BF16 since the baseline*"])


@pytest.mark.parametrize(("code", "verdict"), [(S.OTHER_REFERENCE, Verdict.PASS), (S.OTHER_PROCESS, Verdict.INVALID)])
def test_on_another_host_the_comparison_with_base_answers_alone(code, verdict):
    stored = Decision(code, Verdict.INVALID, "why", question="speedup")
    compared = Comparison("a", Decision(None, Verdict.PASS, "as fast as base's", question="same session"))
    assert with_base(stored, compared).verdict is verdict
