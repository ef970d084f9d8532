"""``pytest-fp8 compare``: the rule by simulation, the command with fake arms, and real arms of two commits and two
interpreters on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8 import Case, SettingsError
from pytest_fp8.arms.environment import ArmEnvironment, checkout, probed
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.cli import main
from pytest_fp8.compare.gate import _require_one_bytecode, with_base
from pytest_fp8.compare.session import Comparison, Side, differences, environments
from pytest_fp8.questions.speed.check import OUTSIDE_BAND
from pytest_fp8.rules.change import ALPHA, BETA
from pytest_fp8.rules.same_session import BLOCKS, PAIRS, decide_same_session, own_change
from pytest_fp8.shipping import ship
from pytest_fp8.verdicts import Decision, Verdict
from pytest_fp8.workload import WorkloadReference

OWN_CASE = Case("own", "torchao", "tensorwise", emulated=True)
BETWEEN, WITHIN = 0.0015, 0.0075
"""Spread between processes and between blocks, as measured on H200s."""
SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "tensorwise"), Case("8b", "torchao", "tensorwise")]
EMULATED = [Case("tiny", "torchao", "tensorwise", emulated=True)]
"""
MODEL = """
import torch
from pytest_fp8 import Workload

WIDTH = {width}


def build():
    return torch.nn.Sequential(torch.nn.Linear(32, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 32))


workload = Workload(
    build=build,
    batch=lambda step: torch.randn(16, 32),
    loss=lambda model, x: (model(x) - x).float().pow(2).mean(),
)
"""


# -- the rule -----------------------------------------------------------------------------------------------------


def verdicts(change, tolerance=0.03, repeats=1000, between=BETWEEN):
    rng = np.random.default_rng(5)
    found = []
    for _ in range(repeats):
        pairs = []
        for count in PAIRS:
            while len(pairs) < count:
                pairs.append(list(np.log(1 + change) + rng.normal(0, between) + rng.normal(0, WITHIN, BLOCKS)))
            decided = decide_same_session(pairs, tolerance).verdict
            if decided is not Verdict.INCONCLUSIVE:
                break
        found.append(decided)
    return {verdict: found.count(verdict) / repeats for verdict in Verdict}


@pytest.mark.parametrize("between", [BETWEEN, 2 * BETWEEN])
def test_an_unchanged_head_passes(between):
    rates = verdicts(0.0, tolerance=0.01, between=between)
    assert rates[Verdict.FAIL] <= ALPHA
    assert rates[Verdict.PASS] + rates[Verdict.IMPROVED] > 0.99


def test_a_loss_of_exactly_the_tolerance_rarely_passes():
    assert verdicts(-0.01, tolerance=0.01)[Verdict.PASS] <= BETA


@pytest.mark.parametrize(("change", "tolerance", "power"), [(-0.01, 0.01, 0.95), (-0.02, 0.01, 0.99)])
def test_a_slower_head_fails(change, tolerance, power):
    assert verdicts(change, tolerance)[Verdict.FAIL] > power


def test_a_loss_well_within_the_tolerance_passes():
    assert verdicts(-0.01, tolerance=0.03)[Verdict.PASS] > 0.99


def test_bf16_taken_off_leaves_what_is_fp8s_own():
    slower = [[-0.05 + 0.001 * k for k in range(-2, 3)]] * 4
    same = [[0.001 * k for k in range(-2, 3)]] * 4
    low, high = decide_same_session(slower, 0.03).interval
    assert low < decide_same_session(slower, 0.03).change < high < 0, "a change that its interval lies around"
    own = own_change(decide_same_session(slower, 0.03), decide_same_session(slower, 0.03))
    assert abs(own.theta) < own.half_width()
    own = own_change(decide_same_session(slower, 0.03), decide_same_session(same, 0.03))
    assert own.theta == pytest.approx(-0.05)
    assert own.half_width() < 0.03


@pytest.mark.parametrize("tolerance", [0, 1, -0.1])
def test_a_tolerance_is_a_fraction(tolerance):
    with pytest.raises(ValueError, match="between 0 and 1"):
        decide_same_session([[0.0]], tolerance)


# -- the command, with fake arms ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, gpu=H200, **world):
        install(monkeypatch, gpu, **world)
        # A name of its own for base's interpreter: the same one reads as no difference.
        code = main(["compare", "--base-python", sys.executable, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


CASE = ("--case", "1b-torchao-tensorwise")
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


def test_two_equal_sides_pass_with_one_row_per_arm(run):
    code, out, _ = run(*CASE)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("1b-torchao-tensorwise  ")]
    assert [row[1] for row in rows] == ["fp8", "bf16"]
    assert rows[0][-1] == "PASS"
    assert "base against head: the same libraries" in out


def test_sides_that_take_turns_are_built_three_times_for_each_pair(run, monkeypatch):
    code, _, _ = run("--case", "8b-torchao-tensorwise", "--fp8-only", gpu=H100)
    assert code == 0
    sides = [process.side for process in FakeProcess.world.processes if process.spec is not None]
    assert sides == ["base", "head", "base"] * PAIRS[0]


@pytest.mark.parametrize(
    ("slower", "code", "says"),
    [
        ({("head", "fp8"): 0.06}, 1, "is FP8's own"),
        ({("head", "fp8"): 0.06, ("head", "bf16"): 0.06}, 1, "common to both precisions, not FP8's own"),
        ({("base", "fp8"): 0.06}, 0, "PASS: head's FP8 step is faster than base's"),
        ({("head", "bf16"): 0.06}, 0, "PASS: head's FP8 step is "),
        ({("head", "fp8"): 0.015}, 0, "PASS: head's FP8 step is slower than base's, within the tolerance"),
    ],
)
def test_a_slower_head_exits_with_1_and_says_whose_it_is(run, slower, code, says):
    seen, out, _ = run(*CASE, slower=slower)
    assert says in out
    assert seen == code


def test_a_smaller_tolerance_catches_a_smaller_loss(run):
    assert run(*CASE, "--tolerance=0.005", slower={("head", "fp8"): 0.02})[0] == 1


def test_json(run):
    code, out, _ = run(*CASE, "--json", "--fp8-only", slower={("head", "fp8"): 0.06})
    [comparison] = json.loads(out)
    assert code == 1
    assert comparison["verdict"] == "FAIL"
    assert comparison["fp8"]["change"] == pytest.approx(-0.057, abs=0.005)
    assert "bf16" not in comparison


@pytest.mark.parametrize("option", ["--base-git", "--base-python", "--head-git"])
def test_an_empty_side_is_an_error_and_not_what_is_here(run, option):
    code, _, err = run(option, "", *CASE)
    assert code == 2
    assert f"{option} is given and empty" in err


def test_two_commits_are_compared_with_a_model_of_their_own(run, capsys):
    assert main(["compare", "--base-git", "HEAD", *CASE]) == 2
    said = capsys.readouterr().err
    assert "models of the suite are pytest-fp8's own" in said
    assert "next:     --workload" in said


def test_a_shared_gpu_is_invalid_and_no_answer(run):
    code, out, _ = run(*CASE, strangers=(4242,))
    assert "INVALID: the GPU was shared" in out
    assert code == 2
    assert run(*CASE, "--strict", strangers=(4242,))[0] == 1


def test_a_head_without_fp8_fails_however_fast(run):
    code, out, _ = run(*CASE, executed_roles=("fprop",))
    assert code == 1
    assert "FP8 does not run in head as it should" in out


def test_an_arm_that_cannot_be_built_is_no_answer(run):
    code, _, err = run(*CASE, fails={"1b-torchao-tensorwise": "died"})
    assert code == 2
    assert "failed" in err


def test_what_was_measured_before_an_arm_died_is_told(run):
    code, out, err = run(*CASE, "--case", "8b-torchao-tensorwise", fails={"8b-torchao-tensorwise": "died"})
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


def in_tests(pytester, monkeypatch, *arguments, **world):
    install(monkeypatch, H200, **world)
    pytester.makepyfile(IN_TESTS)
    return pytester.runpytest("--fp8-gpu=h200", f"--fp8-base-python={sys.executable}", *arguments)


def test_a_test_session_gates_without_a_baseline_against_base(pytester, monkeypatch):
    equal = in_tests(pytester, monkeypatch)
    assert equal.ret == 0
    equal.stdout.fnmatch_lines(["*2 passed*"])
    equal.stdout.no_fnmatch_line("*nothing was timed beside the base*")


def test_base_is_the_commit_that_its_name_meant_at_the_start_and_is_told(pytester, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    moves = "def test_a_colleague_pulls():\n    subprocess.run(['git', 'tag', '-f', 'base', 'HEAD'], check=True)\n"
    pytester.makepyfile(test_1_moves=f"import subprocess\n\n{moves}", test_2_asks=IN_TESTS)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"], ["tag", "base"]):
        subprocess.run([*git, *command], check=True, cwd=pytester.path)
    before = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=pytester.path, text=True).strip()
    subprocess.run([*git, "commit", "-qm", "head", "--allow-empty"], check=True, cwd=pytester.path)
    install(monkeypatch, H200)
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-base-git=base")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"timed beside the base base: commit {before[:12]}", "*3 passed*"])


def test_a_base_that_no_test_asks_the_speed_of_is_noted(pytester, monkeypatch):
    result = in_tests(pytester, monkeypatch, "-k", "not speedup")
    assert result.ret == 0
    says = (
        f"nothing was timed beside the base {sys.executable}: no test that ran asked assert_speedup(), or it had no *"
    )
    result.stdout.fnmatch_lines([says, "*1 passed*"])
    strict = in_tests(pytester, monkeypatch, "-k", "not speedup", "--fp8-strict")
    assert strict.ret == 1
    strict.stdout.fnmatch_lines([says, "*1 passed*"])


@pytest.mark.parametrize("share", [0.02, 0.06])
def test_a_test_session_fails_what_is_slower_than_base(pytester, monkeypatch, share):
    slower = in_tests(pytester, monkeypatch, slower={("head", "fp8"): share})
    slower.assert_outcomes(passed=1, failed=1)
    slower.stdout.fnmatch_lines(["*FAIL: head is slower than base in FP8*", "*at most 1.0% slower than base's*"])


def test_the_stored_baseline_stays_behind_base_as_the_coarse_guard(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(IN_TESTS)
    assert pytester.runpytest("--fp8-gpu=h200", "--fp8-update-baselines", "--fp8-reason=first").ret == 0
    install(monkeypatch, H200, speedup=1.05)
    crept = pytester.runpytest("--fp8-gpu=h200", f"--fp8-base-python={sys.executable}", "-k", "speedup")
    crept.assert_outcomes(failed=1, deselected=1)
    crept.stdout.fnmatch_lines(["*FAIL: FP8 lost speed against BF16 since the baseline*"])


def test_on_another_host_the_comparison_with_base_answers_alone():
    def stored(headline):
        return Decision("speedup", Verdict.INVALID, headline)

    compared = Comparison("a", Decision("same session", Verdict.PASS, "as fast as base's"))
    assert with_base(stored(OUTSIDE_BAND), compared).verdict is Verdict.PASS
    assert with_base(stored("another process used the GPU"), compared).verdict is Verdict.INVALID


def test_a_base_that_cannot_be_had_is_one_clear_error(pytester, monkeypatch):
    broken = pytester.path / "broken"
    broken.write_text("#!/bin/sh\ncase \"$*\" in *'print(1)') echo 1;; *) exit 1;; esac\n")
    broken.chmod(0o755)
    result = in_tests(pytester, monkeypatch, "--fp8-base-python", str(broken), "-k", "speedup")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*base: *broken is not a Python that arms can run in*"])


def test_a_model_of_a_test_file_does_not_cross_to_another_python():
    base, head = (ArmEnvironment(name, name, (), {"python": v}) for name, v in (("base", "3.12.1"), ("head", "3.11.9")))
    with pytest.raises(SettingsError, match="another Python"):
        _require_one_bytecode(base, head)
    _require_one_bytecode(replace(base, versions={"python": "3.11.2"}), head)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--case", "9b"), "expected: 1b-torchao-tensorwise"),
        ((*CASE, "--tolerance=2"), "between 0 and 1"),
        ((*CASE, "--head-python=/nowhere/python"), "is not a Python that arms can run in"),
        ((*CASE, "--head-git=no-such-branch"), "cannot be checked out"),
        ((*CASE, "--workload=no_colon"), "does not name a workload"),
        ((*CASE, "--workload=a:b"), "expected: own-bf16, own-torchao-tensorwise, "),
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


def test_one_side_is_no_comparison(run, capsys):
    assert main(["compare", *CASE]) == 2
    assert "needs two sides" in capsys.readouterr().err


def test_libraries_that_differ_are_named():
    base, head = (
        ArmEnvironment(n, "p", (), {"torch": v, "torchao": "0.18"}) for n, v in (("base", "1"), ("head", "2"))
    )
    assert differences(base, head) == ["torch 1 -> 2"]


# -- real arms on the CPU -----------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository whose model is 64 wide in the commit ``base`` and 128 wide in the working tree."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "compared_model.py").write_text(MODEL.format(width=64))
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"], ["tag", "base"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "compared_model.py").write_text(MODEL.format(width=128))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(environment):
    workload = ship(WorkloadReference("compared_model:workload"), "the workload")
    arm = ArmProcess(environment=environment)
    try:
        facts = arm.build(ArmSpec(OWN_CASE, "cpu", workload, threads=1))
        return facts, arm.request("curve", seed=0, steps=3)["losses"]
    finally:
        arm.close()


@pytest.mark.slow
def test_two_commits_run_their_own_code_with_one_instrument(project):
    with ExitStack() as held:
        base, head = environments(Side(revision="base"), Side(), project, held)
        (old, old_losses), (new, new_losses) = built(base), built(head)
        assert Path(base.import_path[0], "compared_model.py").read_text() == MODEL.format(width=64)
    assert old["parameters"] == 2 * 32 * 64 + 64 + 32
    assert new["parameters"] == 2 * 32 * 128 + 128 + 32
    assert old_losses != new_losses
    assert not Path(base.import_path[0]).exists(), "the checkout is gone"


@pytest.mark.slow
def test_another_interpreter_brings_its_own_libraries_and_none_of_ours(project, tmp_path, monkeypatch):
    other = tmp_path / "other"
    venv.create(other, symlinks=True, with_pip=False)
    packages = next((other / "lib").glob("python*")) / "site-packages"
    python = other / "bin/python"
    with pytest.raises(SettingsError, match="lacks what an arm needs") as error:
        probed("head", str(python), project)
    assert "no torch" in str(error.value)
    # Now with libraries: those of this interpreter, and a torchao that is only a version number.
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(here))
    (packages / "torchao-0.99.dist-info").mkdir()
    (packages / "torchao-0.99.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torchao\nVersion: 0.99\n")
    head = probed("head", str(python), project)
    assert head.versions["torchao"] == "0.99"
    facts, _ = built(head)
    assert facts["libraries"]["torchao"] == "0.99"
    # What is installed there is that side's project, and not what is here.
    (project / "src/mine").mkdir(parents=True)
    (project / "src/mine/__init__.py").write_text("")
    # What Python keeps beside modules is no package, though a folder of that name is found elsewhere.
    for folder in (project / "src", packages):
        (folder / "__pycache__").mkdir(exist_ok=True)
    assert str(project / "src") in probed("base", str(python), project).import_path
    (packages / "mine").mkdir()
    (packages / "mine/__init__.py").write_text("")
    own = probed("base", str(python), project).import_path
    assert not {str(project / "src"), str(project)} & {*own}
    monkeypatch.setattr(sys, "executable", str(python))
    assert str(project / "src") in probed("head", str(python), project).import_path, "what is tested here is here"


def test_a_checkout_below_the_root_of_a_repository(project):
    (project / "package").mkdir()
    (project / "package/here.txt").write_text("x")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "more"], check=True)
    with checkout("HEAD", project / "package") as folder:
        assert (folder / "here.txt").read_text() == "x"


@pytest.mark.slow
def test_an_arm_of_another_environment_leaves_nothing_behind(project):
    environment = probed("head", sys.executable, project)
    arm = ArmProcess(environment=environment)
    arm.build(ArmSpec(OWN_CASE, "cpu", ship(WorkloadReference("compared_model:workload"), "it"), threads=1))
    variables = dict(v.split(b"=", 1) for v in Path(f"/proc/{arm.pid}/environ").read_bytes().split(b"\0") if b"=" in v)
    folders = variables[b"PYTHONPATH"].decode().split(os.pathsep)
    assert folders[0] == str(project)
    assert os.path.islink(Path(folders[-1], "pytest_fp8"))
    arm.close()
    assert not Path(folders[-1]).exists()
