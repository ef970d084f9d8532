"""What ``fp8_pair`` asks of speed, a measurement that failed, and what a test makes of a decision. Arms are fakes."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from helpers.baselines import baseline
from helpers.fakes import H200, FakeProcess, install
from pytest_fp8 import ArmError, Case, CheckFailed, Verdict
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plain import to_plain
from pytest_fp8.report.record import CaseNotes, Notes

CASE = Case("1b", "torchao", "rowwise", floor=1.05)


@pytest.fixture
def ask(monkeypatch):
    """``ask(speedup, stored)``: a pair whose FP8 arm is so much faster, with a baseline of that speedup or none."""
    pools = []

    def made(speedup=1.2, stored=None, **world):
        install(monkeypatch, H200, speedup=speedup, **world)
        pools.append(ArmPool(H200))
        held = baseline(CASE.id, "hash", metrics={"speedup": [[math.log(stored)] * 8] * 4}) if stored else None
        settings, notes = SimpleNamespace(update=False, strict=False, processes=4), Notes()
        arms = PairArms(CASE, pools[-1], None)
        return Fp8Pair(arms, settings, CaseNotes(notes, CASE.id, "a model"), held, "file.json"), notes

    yield made
    for pool in pools:
        pool.close()


def noted(notes):
    return {answer.question: answer.verdict for answer in notes.answers}


def test_faster_asks_the_floor_and_nothing_else(ask):
    pair, notes = ask(1.2, stored=1.5)
    assert pair.assert_faster().verdict is Verdict.PASS
    assert noted(notes) == {"faster": "PASS"}
    with pytest.raises(CheckFailed, match=r"FP8 is not faster than the best BF16[\s\S]*floor 1\.30x"):
        pair.assert_faster(floor=1.3)
    with pytest.raises(CheckFailed, match=r"floor 1\.05x"):
        ask(1.02)[0].assert_faster()


def test_speedup_asks_the_baseline_and_nothing_else(ask):
    pair, notes = ask(1.0, stored=1.0)
    assert pair.assert_speedup().verdict is Verdict.PASS
    assert noted(notes) == {"speedup": "PASS"}
    with pytest.raises(CheckFailed, match="lost speed against BF16 since the baseline"):
        ask(1.2, stored=1.5)[0].assert_speedup()
    decision = ask(1.2)[0].assert_speedup()
    assert decision.verdict is Verdict.NOT_EXERCISED
    assert "file.json" in decision.message


def test_a_measurement_that_failed_is_taken_anew_as_a_whole(ask, monkeypatch):
    pair, _ = ask()
    real, calls = FakeProcess.blocks, []

    def fails_once(self, **asked):
        calls.append(asked)
        if len(calls) == 6:
            raise ArmError(R.ARM_DIED, "the arm died")
        return real(self, **asked)

    monkeypatch.setattr(FakeProcess, "blocks", fails_once)
    with pytest.raises(ArmError):
        pair.timing_evidence()
    evidence = pair.timing_evidence()
    assert [len(x) for x in (*evidence.bf16, *evidence.fp8)] == [12, 12]


@pytest.mark.parametrize(("roles", "name"), [(("fprop",), "FAIL"), (None, "PASS")])
def test_a_decision_has_no_truth_value_and_its_verdict_is_its_name(ask, roles, name):
    decision = ask(executed_roles=roles)[0].layers()
    with pytest.raises(TypeError, match=r"a decision on 'layers'.*: fp8_pair\.assert_layers\(\)"):
        bool(decision)
    assert decision.verdict == name
    assert json.dumps(to_plain(decision.verdict)) == f'"{name}"'
    assert [str(verdict) for verdict in Verdict] == [verdict.name for verdict in Verdict]
