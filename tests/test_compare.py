"""``pytest-fp8 compare`` with fake arms: its verdicts, its exit codes, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8.cli import main
from pytest_fp8.codes import R
from pytest_fp8.stats.looks import BESIDE

SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "tensorwise"), Case("8b", "torchao", "tensorwise")]
EMULATED = [Case("tiny", "torchao", "tensorwise", emulated=True)]
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    # Of this package's own commits the suite's models can be compared.
    (tmp_path / "pytest_fp8/compare").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command], check=True)

    def call(*arguments, gpu=H200, **world):
        install(monkeypatch, gpu, **world)
        code = main(["compare", "--base-git", "HEAD", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


CASE = ("--case", "1b-torchao-tensorwise")


def test_two_equal_sides_pass_with_one_row_per_arm(run):
    code, out, _ = run(*CASE)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("1b-torchao-tensorwise  ")]
    assert [row[1] for row in rows] == ["fp8", "bf16"]
    assert rows[0][-1] == "PASS"


def test_sides_that_take_turns_are_built_three_times_for_each_pair(run, monkeypatch):
    code, _, _ = run("--case", "8b-torchao-tensorwise", "--fp8-only", gpu=H100)
    assert code == 0
    sides = [process.side for process in FakeProcess.world.processes if process.spec is not None]
    # Both at once, then one after the other, then in turns.
    first = ["base", "head", "head", "head", "base"]
    assert sides == first + ["base", "head", "base"] * (BESIDE.pairs[0] - 1), "seen once both are there"


@pytest.mark.parametrize(
    ("slower", "code", "says"),
    [
        ({("head", "fp8"): 0.06}, 1, "is FP8's own"),
        ({("head", "fp8"): 0.06, ("head", "bf16"): 0.06}, 1, "common to both precisions, not FP8's own"),
        ({("base", "fp8"): 0.06}, 0, "PASS: head's FP8 step is faster than base's"),
        ({("head", "bf16"): 0.06}, 0, "PASS: head's FP8 step is "),
        ({("head", "fp8"): 0.005}, 0, "PASS: head's FP8 step is slower than base's, within the tolerance"),
    ],
)
def test_a_slower_head_exits_with_1_and_says_whose_it_is(run, slower, code, says):
    seen, out, _ = run(*CASE, slower=slower)
    assert says in out
    assert seen == code


def test_the_tolerance_is_that_of_the_comparison_in_a_test_session(run):
    code, out, _ = run(*CASE, "--fp8-only", slower={("head", "fp8"): 0.015})
    assert code == 1
    assert "at most 1.0% slower" in out
    assert run(*CASE, "--tolerance=0.02", "--fp8-only", slower={("head", "fp8"): 0.01})[0] == 0


@pytest.mark.parametrize("option", ["--base-git", "--head-git"])
def test_an_empty_side_is_an_error_and_not_what_is_here(run, option):
    code, _, err = run(option, "", *CASE)
    assert code == 2
    assert "one is given and empty" in err


def test_two_commits_are_compared_with_a_model_of_their_own(run, capsys):
    shutil.rmtree("pytest_fp8")
    assert main(["compare", "--base-git", "HEAD", *CASE]) == 2
    said = capsys.readouterr().err
    assert "models of the suite are pytest-fp8's own" in said
    assert "`--workload module:name" in said


def test_a_shared_gpu_is_invalid_and_no_answer(run):
    code, out, _ = run(*CASE, strangers=(4242,))
    assert "INVALID FP8-S13: another process used the GPU" in out
    assert code == 2


def test_a_head_without_fp8_fails_however_fast(run):
    code, out, _ = run(*CASE, executed_roles=("fprop",))
    assert code == 1
    assert "FAIL FP8-L" in out
    assert "dgrad" in out


def test_what_was_measured_before_an_arm_died_is_told(run):
    code, out, err = run(*CASE, "--case", "8b-torchao-tensorwise", fails={"8b-torchao-tensorwise": R.ARM_DIED})
    assert code == 2
    assert "1b-torchao-tensorwise: PASS" in out
    assert "failed" in err


def test_no_gpu_no_speed(run):
    code, _, err = run(*CASE, gpu=None)
    assert code == 2
    assert "expected: a GPU" in err
    code, _, err = run("--case", "tiny-torchao-tensorwise-emulated")
    assert code == 2
    assert "emulated on the CPU" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--case", "9b"), "expected: 1b-torchao-tensorwise"),
        ((*CASE, "--tolerance=2"), "between 0 and 1"),
        ((*CASE, "--head-git=no-such-branch"), "cannot be checked out"),
        ((*CASE, "--workload=no_colon"), "does not name a workload"),
        ((*CASE, "--workload=a:b"), "own-bf16, own-torchao-tensorwise, "),
    ],
)
def test_what_cannot_be_compared_is_refused(run, arguments, says):
    code, _, err = run(*arguments)
    assert code == 2
    assert says in err


def test_a_workload_of_ones_own_is_compared_as_own(run):
    code, out, _ = run("--workload=my_project:workload", "--case=own-torchao-tensorwise")
    assert code == 0
    assert "own-torchao-tensorwise: PASS" in out
