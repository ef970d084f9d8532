"""What fails as known, in a run's report: it is KNOWN, and hides no other failure. So does what is known to be slower
than the floor of a speedup."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.records import Told
from pytest_fp8.codes import L, R
from pytest_fp8.report.files import read_report
from pytest_fp8.verdicts import Decision, Verdict

HEAD = """
import pytest
from pytest_fp8 import Case

CASE = dict(cases=[Case("tiny", "torchao", "rowwise")])
OTHER = dict(cases=[Case("tiny", "torchao", "tensorwise")])
KNOWN = pytest.mark.xfail(reason="somelib 1.2: leaves its backward in BF16")

@pytest.fixture
def checked(fp8_pair):
    fp8_pair.assert_layers()
    return fp8_pair

@pytest.mark.fp8(**CASE, question="loss")
def test_loss(fp8_pair):
    fp8_pair.assert_loss()
"""
LAYERS = """
@KNOWN
@pytest.mark.fp8(**CASE, question="layers")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()
"""
AGAIN = LAYERS.replace("@KNOWN\n", "").replace("test_layers", "test_again")
ASKS_NOTHING = """
@pytest.mark.fp8(**CASE, question="speedup")
def test_faster(fp8_pair):
    pytest.xfail("this host is slow")
"""
IN_SET_UP = """
@pytest.mark.fp8(**CASE)
def test_in_set_up(checked): ...

@KNOWN
@pytest.mark.fp8(**OTHER, question="memory")
def test_neighbour(fp8_pair):
    assert fp8_pair.memory().numbers["ratio"] < 0.1
"""
LOOK = """
@pytest.mark.fp8(**CASE)
def test_look(fp8_pair):
    fp8_pair.layers()
    fp8_pair.assert_loss()
"""
DIES = """
@KNOWN
@pytest.mark.fp8(**OTHER)
def test_dies({}):
    {}.assert_layers()
"""
DIES_AGAIN = DIES.format("fp8_pair", "fp8_pair").replace("@KNOWN\n", "").replace("test_dies", "test_dies_again")
DISTURBED = {"strangers": (4242,), "executed_roles": None}
DEAD = {"fails": {"tiny-torchao-tensorwise": R.ARM_DIED}}


def own(body):
    """A test that fails as known by itself."""
    return f"\n@KNOWN\n@pytest.mark.fp8(**CASE)\ndef test_own(fp8_pair):\n    {body}\n"


DEATH = DIES.format("fp8_pair", "fp8_pair")
SESSIONS = {
    # name: (tests, the arms' faults, first line of the summary after its title, what the row says, whether it fails)
    "beside what else was asked": ((LAYERS,), {}, "1 KNOWN", "KNOWN", False),
    "another failure is not known": ((LAYERS,), {"nan_at": 3}, "1 FAIL", "FAIL", True),
    "asks nothing": ((ASKS_NOTHING,), {}, "1 PASS", "PASS", False),
    "a later look": ((LAYERS, LOOK), {}, "1 KNOWN", "KNOWN", False),
    "hidden after": ((LAYERS, AGAIN), {}, "1 FAIL", "FAIL", True),
    "hidden before": ((AGAIN, LAYERS), {}, "1 FAIL", "FAIL", True),
    "hidden in a set-up": ((LAYERS, IN_SET_UP), {}, "1 FAIL, 1 NOT EXERCISED", "FAIL", True),
    "its only failure": ((own("assert fp8_pair.layers().verdict.passes"),), {}, "1 KNOWN", "KNOWN", False),
    "one of several": (
        (own("fp8_pair.layers(); fp8_pair.loss(); assert False"),), {"nan_at": 3}, "1 FAIL", "FAIL", True
    ),
    "no answer is never known": (
        (own("fp8_pair.assert_speedup(); assert False"),), DISTURBED, "1 INVALID", "INVALID", True
    ),
    "an arm": ((DEATH,), DEAD, "1 KNOWN, 1 PASS", "PASS", False),
    "an arm, and otherwise": ((DEATH, DIES_AGAIN), DEAD, "1 ERROR, 1 PASS", "PASS", True),
}  # fmt: skip


@pytest.mark.nightly_beyond(6)
@pytest.mark.parametrize("name", SESSIONS)
def test_what_a_run_says_of_it(pytester, monkeypatch, name):
    tests, world, first, row, fails = SESSIONS[name]
    install(monkeypatch, H200, **{"executed_roles": ("fprop",), **world})
    pytester.makepyfile(HEAD + "".join(tests))
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    summary = (pytester.path / "out/summary.md").read_text()
    assert summary.splitlines()[0] == f"## FP8: {first}"
    assert f"| tiny-torchao-rowwise | {row} |" in summary
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if fails else pytest.ExitCode.OK)


@pytest.mark.parametrize(
    ("ended", "known"),
    [
        (("known",), True),
        (("known", "passed"), False),
        (("known", "failed"), False),
        (("failed", "known"), False),
        (("skipped", "known"), False),
        (("passed",), False),
    ],
)
def test_a_question_is_known_that_no_test_failed_with_but_such_as_were_expected_to(ended, known):
    told = Told()
    for test, outcome in enumerate(ended):
        told.notes.begin(str(test))
        told.answer("case", Decision(L.NOTHING_CONVERTED, Verdict.FAIL, "no", question="layers"), asserted=True)
        told.ended(str(test), "case", outcome)
    assert told.entries["case"].known == ["layers"] * known


def test_the_reason_of_a_known_failure_is_one_line_of_plain_text(pytester, monkeypatch):
    install(monkeypatch, H200, **DEAD)
    mark = "@pytest.mark.xfail(reason='a\\n::error::b \\x1b[31m' + 'c' * 5000, strict=True)\n"
    pytester.makepyfile(HEAD + mark + DIES_AGAIN)
    pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    [reason] = read_report(pytester.path / "out").entries["tiny-torchao-tensorwise"].expected
    assert reason == "a"


# -- the floor of a speedup --------------------------------------------------------------------------------------------

GATE, STRICT = ("--fp8-gpu=h200",), ("--fp8-strict",)

SUITES = str(Path(__file__).parents[2] / "suites")
FLOOR = f"""
    import sys
    sys.path.insert(0, {SUITES!r})
    import pytest
    import floor
    from floor import assert_faster
    from pytest_fp8 import Case

    TINY = Case("tiny", "torchao", "rowwise")
    floor.SLOWER[TINY.id] = "narrow"

    @pytest.mark.fp8(cases=[TINY], question="speedup")
    def test_faster(request, fp8_pair):
        assert_faster(request, fp8_pair)
"""
SLOW_HOST = {"speedup": 0.8, "busy": 60.0, "kernels_alone": True}
"""A gate run: its first look is one pair of processes, which proves nothing, while busy times would pass."""


@pytest.mark.parametrize(
    ("world", "options", "outcome", "says"),
    [
        ({"speedup": 0.8}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 1.2}, (), {"failed": 1}, "is faster than BF16, and floor.SLOWER says: narrow"),
        # Within the noise of one pair of processes, and below the floor with more of them.
        ({"speedup": 0.991}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 0.8}, ("--runxfail",), {"failed": 1}, "FP8 is not faster than the best BF16"),
        ({"speedup": 0.8, "strangers": (4242,)}, (), {}, "1 invalid"),
        ({"strangers": (4242,)}, STRICT, {"failed": 1}, "another process used the GPU"),
        ({"fails": {"tiny-torchao-rowwise": R.OUT_OF_MEMORY}}, (), {"failed": 1}, "tiny-torchao-rowwise"),
    ],
)
def test_what_is_known_to_be_slower_fails_for_that_alone(pytester, monkeypatch, world, options, outcome, says):
    install(monkeypatch, H200, **world)
    pytester.makepyfile(FLOOR)
    result = pytester.runpytest(*GATE, "--fp8-report=out", *options)
    result.assert_outcomes(**outcome)
    summary = (pytester.path / "out" / "summary.md").read_text()
    assert ("| KNOWN" in summary) is ("xfailed" in outcome)
    assert "no FP8 test ran" not in result.stdout.str()
    assert re.search(re.escape(says), result.stdout.str())


@pytest.mark.parametrize(("kernels", "outcome"), [(1.2, "xfailed"), (0.9, "failed")])
def test_the_suite_expects_a_slow_host_to_miss_the_floor_and_nothing_else(pytester, monkeypatch, kernels, outcome):
    install(monkeypatch, H200, kernels=kernels, **SLOW_HOST)
    pytester.makepyfile(FLOOR.replace("floor.SLOWER[TINY.id]", "known"))
    result = pytester.runpytest(*GATE, "-rx", "--fp8-report=out")
    result.assert_outcomes(**{outcome: 1})
    known = "| KNOWN" in (pytester.path / "out" / "summary.md").read_text()
    assert known is (outcome == "xfailed")
    slow_host = "*this machine's host is too slow for it: launch-bound: the GPU works [45]?.? ms of each 12* ms step*"
    result.stdout.fnmatch_lines([slow_host] if known else ["*FP8 is not faster than the best BF16*"])


def test_steps_below_the_floor_take_a_further_pair_though_busy_times_pass(pytester, monkeypatch):
    world = install(monkeypatch, H200, kernels=1.2, **SLOW_HOST)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest(*GATE, "-k", "test_faster and rowwise")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*FP8 is not faster than the best BF16*", "*2 process(es)*", "*launch-bound*1.20x*"])
    assert world.built.count("tiny-torchao-rowwise") == 2


def test_what_an_h200_showed_is_not_asked_of_another_gpu(pytester, monkeypatch):
    install(monkeypatch, replace(H200, name="NVIDIA H100 80GB HBM3", memory=80 * 2**30), speedup=1.2)
    pytester.makepyfile(FLOOR)
    pytester.runpytest("--fp8-gpu=h100").assert_outcomes(passed=1)
