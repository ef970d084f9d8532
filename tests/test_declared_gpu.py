"""Which tests run on which machine, and sessions in which nothing ran: a gate that asked the declared GPU nothing is
not green, whatever kept its tests from it."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.fakes import A100, B200, H100, H200, L40S, SUITE, install
from pytest_fp8 import Case, markers
from pytest_fp8.options import Settings
from pytest_fp8.pairs import Pairs
from pytest_fp8.report.record import Notes

TINY = "Case('tiny', 'torchao', 'tensorwise'"
HEAD = "import pytest\nfrom pytest_fp8 import Case\n"
ONE = f"""
@pytest.mark.fp8(cases=[{TINY}, floor=0.5)])
def test_it(fp8_pair):
    fp8_pair.assert_layers()
"""
EMULATED = ONE.replace("floor=0.5", "emulated=True").replace("test_it", "test_emulated")
OTHER = "\ndef test_other(): pass\n"
MXFP8 = ONE.replace(f"{TINY}, floor=0.5)", "Case('tiny', 'transformer_engine', 'mxfp8')")
SKIPPED = "pytestmark = pytest.mark.skip(reason='not today')\n"
SKIPS = "@pytest.fixture(autouse=True)\ndef f():\n    pytest.skip('not today')\n"
NOT_RUN = "pytestmark = pytest.mark.xfail(reason='not today', run=False)\n"
TIMES = ONE.replace("fp8_pair.assert_layers()", "fp8_pair.timing_evidence(); pytest.skip('not today')")
NEVER_ASKS = ONE.replace("fp8_pair.assert_layers()", "pytest.xfail('not today')")
SET_UP_FAILS = "@pytest.fixture\ndef broken():\n    raise RuntimeError\n" + ONE.replace(
    "@pytest.mark.fp8", "@pytest.mark.xfail\n@pytest.mark.fp8"
).replace("(fp8_pair):", "(broken, fp8_pair):")
NOTHING = "*no FP8 test ran on it: {}. A gate that ran nothing is not green*"
GATE = ("--fp8-gpu=h200",)
SESSIONS = {
    # name: (GPU, tests, options, outcomes, exit code, what is said)
    "declared, none here": (None, ONE, GATE, {"skipped": 1}, 1, "*--fp8-gpu=h200 was declared; no NVIDIA GPU*"),
    "declared, another here": (H100, ONE, GATE, {"skipped": 1}, 1, "*was declared; this is NVIDIA H100*"),
    "declared, one without FP8": (A100, ONE, GATE, {"skipped": 1}, 1, "*was declared; this is NVIDIA A100*"),
    "auto, none here": (None, ONE, ("-rs",), {"skipped": 1}, 0, "*needs a GPU with FP8 tensor cores*"),
    "auto, one without FP8": (A100, ONE, ("-rs",), {"skipped": 1}, 0, "*needs a GPU with FP8 tensor cores*"),
    "no test asks it": (H200, OTHER, GATE, {"passed": 1}, 1, "*no test of this run asks anything of a GPU*"),
    "a mark skips": (H200, SKIPPED + ONE, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "a fixture skips": (H200, SKIPS + ONE, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "expected to fail, not run": (H200, NOT_RUN + ONE, GATE, {"xfailed": 1}, 1, NOTHING.format("*not today")),
    "timed and skipped": (H200, TIMES, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "fails as expected in set-up": (H200, SET_UP_FAILS, GATE, {"xfailed": 1}, 1, NOTHING.format("expected to fail")),
    "fails as expected, asks nothing": (H200, NEVER_ASKS, GATE, {"xfailed": 1}, 1, NOTHING.format("not today")),
    "a recipe of another chip": (H200, MXFP8, GATE, {"errors": 1}, 1, "*recipe 'mxfp8' of * needs*10.0*"),
    "emulated beside a GPU": (H200, EMULATED, (), {"passed": 1}, 0, "*tiny-torchao-tensorwise-emulated*"),
    "emulated beside a test of it": (H200, EMULATED + ONE, ("-rs",), {"passed": 1, "skipped": 1}, 0, "* emulated: *"),
    "emulated, declared": (H200, EMULATED, (*GATE, "-rs"), {"skipped": 1}, 1, "*an emulated test asks nothing of it"),
}


@pytest.mark.nightly_beyond(10)
@pytest.mark.parametrize("name", SESSIONS)
def test_what_runs_and_whether_the_session_is_green(pytester, monkeypatch, name):
    gpu, tests, options, outcomes, code, says = SESSIONS[name]
    install(monkeypatch, gpu)
    pytester.makepyfile(HEAD + tests)
    result = pytester.runpytest(*options)
    result.assert_outcomes(**outcomes)
    assert result.ret == code
    result.stdout.fnmatch_lines([says])


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize("gpu", [B200, L40S, H100], ids=["b200", "l40s", "h100"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_mark_that_names_no_chip_runs_on_each_gpu_that_its_recipe_runs_on(pytester, monkeypatch, gpu, declared):
    install(monkeypatch, gpu)
    pytester.makepyfile(HEAD + ONE)
    pytester.runpytest(*[f"--fp8-gpu={gpu.key}"] * declared).assert_outcomes(passed=1)


def test_of_two_marks_that_differ_in_their_chip_the_one_for_this_gpu_counts(pytester, monkeypatch):
    """Here the emulated test is skipped, since another one asks the GPU: the first mark does, the second does not."""
    install(monkeypatch, L40S)
    hopper, ada = (ONE.replace("floor=0.5", f"chip='{chip}'") for chip in ("hopper", "ada"))
    pytester.makepyfile(HEAD + hopper + ada.replace("test_it", "test_ada") + EMULATED)
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*emulated: other tests of this session ask the NVIDIA L40S itself*"])


def test_cases_that_are_skipped_here_share_no_false_alarms(monkeypatch):
    install(monkeypatch, H100)
    here = Case("1b", "torchao", "tensorwise")
    elsewhere = [Case("1b", "te", "mxfp8", seq=1024 + index) for index in range(19)]
    pairs = Pairs(Settings(gpu="h100"), Path(), Notes(), "", ExitStack())
    pairs.collected([(case, "speedup") for case in (here, *elsewhere)])
    assert pairs.gated_cases == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_library_that_is_missing_fails_a_gate_and_skips_elsewhere(pytester, monkeypatch, strict):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.recipes.BackendFacts.available", lambda self: (False, f"{self.name} is missing"))
    pytester.makepyfile(HEAD + ONE)
    declared = pytester.runpytest(*GATE)
    declared.assert_outcomes(errors=1)
    declared.stdout.fnmatch_lines(["*torchao is missing*"])
    auto = pytester.runpytest(*["--fp8-strict"] * strict, "--fp8-report=out")
    auto.assert_outcomes(skipped=1)
    assert auto.ret == strict
    auto.stdout.fnmatch_lines(["*= FP8 =*", "1 not run: torchao is missing (*"])
    told = "FP8-R44: no FP8 test ran under --fp8-strict: torchao is missing. A gate that ran nothing*"
    (auto.stdout.fnmatch_lines if strict else auto.stdout.no_fnmatch_line)(told)
    assert (pytester.path / "out/summary.md").read_text().startswith("## FP8: nothing ran")


def test_strict_asks_nothing_of_a_session_without_fp8_tests_or_with_one_that_ran(pytester, monkeypatch):
    install(monkeypatch, None)
    monkeypatch.setattr(markers, "_library", lambda case: "" if case.backend == "torchao" else "not installed")
    missing = EMULATED.replace("'torchao'", "'accelerate_torchao'").replace("test_emulated", "test_missing")
    pytester.makepyfile(test_other=OTHER, test_mixed=HEAD + missing + EMULATED)
    assert pytester.runpytest("--fp8-strict", "test_other.py").ret == 0
    assert pytester.runpytest("--fp8-strict", "test_mixed.py").ret == 0


@pytest.mark.slow
def test_a_strict_gate_that_ran_nothing_is_red_under_xdist_too(pytester):
    pytester.makepyfile(HEAD + SKIPPED + EMULATED)
    result = pytester.runpytest_subprocess("--fp8-strict", "-n", "2", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["FP8-R44: no FP8 test ran under --fp8-strict: not today. A gate that ran nothing*"])


@pytest.mark.oldest
def test_a_run_that_was_interrupted_at_once_is_not_said_to_have_run_nothing(pytester, monkeypatch, capsys):
    install(monkeypatch, H200)
    pytester.makeconftest("def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n")
    pytester.makepyfile(textwrap.dedent(SUITE))
    done = pytester.inline_run("--fp8-gpu=h200", no_reraise_ctrlc=True)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    said = capsys.readouterr().out
    assert "KeyboardInterrupt" in said
    assert "ran nothing" not in said


def test_without_a_gpu_a_session_that_asked_nothing_says_why_and_how_to_go_on(pytester, monkeypatch):
    install(monkeypatch, None)
    pytester.makepyfile("import pytest\n@pytest.mark.fp8\ndef test_mine(fp8_pair): ...")
    result = pytester.runpytest()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["=* FP8 *=", "1 not run: needs a GPU with FP8 *: no NVIDIA GPU (fake); emulated=True in*"]
    )
