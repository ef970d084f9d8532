"""The floor of a speedup: what is slower than BF16 fails, and what is known to be slower fails as known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, FakeProcess, install
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError

GATE, STRICT = ("--fp8-gpu=h200",), ("--fp8-strict",)

SUITES = str(Path(__file__).parent.parent.parent / "suites")
KNOWN = f"""
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


def blocks_fail(monkeypatch):
    def blocks(self, **_):
        raise ArmError(R.ARM_DIED, "blocks went wrong")

    monkeypatch.setattr(FakeProcess, "blocks", blocks)


@pytest.mark.parametrize(
    ("world", "options", "outcome", "says"),
    [
        ({"speedup": 0.8}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 1.2}, (), {"failed": 1}, "XPASS(strict)] narrow"),
        # Within the noise of one pair of processes, and below the floor with more of them.
        ({"speedup": 0.991}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 0.8}, ("--runxfail",), {"failed": 1}, "FP8 is not faster than the best BF16"),
        ({"speedup": 0.8, "strangers": (4242,)}, (), {}, "1 invalid"),
        ({"strangers": (4242,)}, STRICT, {"failed": 1}, "another process used the GPU"),
        ({"fails": {"tiny-torchao-rowwise": R.OUT_OF_MEMORY}}, (), {"failed": 1}, "tiny-torchao-rowwise"),
        ({"blocks": blocks_fail}, (), {"failed": 1}, "blocks went wrong"),
    ],
)
def test_what_is_known_to_be_slower_fails_for_that_alone(pytester, monkeypatch, world, options, outcome, says):
    world = {**world}
    world.pop("blocks", lambda monkeypatch: None)(monkeypatch)
    install(monkeypatch, H200, **world)
    pytester.makepyfile(KNOWN)
    result = pytester.runpytest(*GATE, "--fp8-report=out", *options)
    result.assert_outcomes(**outcome)
    summary = (pytester.path / "out" / "summary.md").read_text()
    assert ("| KNOWN" in summary) is ("xfailed" in outcome)
    assert "no FP8 test ran" not in result.stdout.str()
    assert re.search(re.escape(says), result.stdout.str())


@pytest.mark.parametrize(("kernels", "outcome"), [(1.2, "xfailed"), (0.9, "failed")])
def test_the_suite_expects_a_slow_host_to_miss_the_floor_and_nothing_else(pytester, monkeypatch, kernels, outcome):
    install(monkeypatch, H200, kernels=kernels, **SLOW_HOST)
    pytester.makepyfile(KNOWN.replace("floor.SLOWER[TINY.id]", "known"))
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
    pytester.makepyfile(KNOWN)
    pytester.runpytest("--fp8-gpu=h100").assert_outcomes(xpassed=1)
