"""What the stored baselines say about a claim: the rule, and which case answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.claims.__main__ import markdown
from benchmarks.claims.judge import (
    ABOUT,
    AT_LEAST,
    AT_MOST,
    DID_NOT_HOLD,
    HELD,
    NOT_MEASURED,
    NOT_REPRODUCED,
    PARTLY,
    Near,
    Reading,
    Source,
    judge,
    verdict,
)
from helpers.claims import CASE, OTHER, SOURCE, baseline, claim, speed
from pytest_fp8 import Case


def reading(low, high):
    return Reading((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("compare", "claimed", "measured", "word"),
    [
        (AT_LEAST, (1.3, 1.3), (1.144, 1.154), DID_NOT_HOLD),
        (AT_LEAST, (1.3, 1.3), (1.28, 1.29), HELD),
        (AT_LEAST, (1.3, 1.3), (1.26, 1.28), PARTLY),
        (AT_LEAST, (1.7, 2.2), (1.75, 1.8), HELD),
        (AT_LEAST, (1.7, 2.2), (2.9, 3.0), DID_NOT_HOLD),
        (AT_MOST, (0.6, 0.6), (1.16, 1.16), DID_NOT_HOLD),
        (AT_MOST, (0.6, 0.6), (0.3, 0.3), HELD),
        (ABOUT, (0.82, 0.82), (0.815, 0.83), HELD),
        (ABOUT, (0.82, 0.82), (1.29, 1.31), DID_NOT_HOLD),
        (ABOUT, (0.82, 0.82), (0.7, 0.81), PARTLY),
        (ABOUT, (0.82, 0.82), (0.5, 1.5), PARTLY),
        (ABOUT, (0, 0), (0, 0), HELD),
        (ABOUT, (0, 0), (28, 28), DID_NOT_HOLD),
        (AT_MOST, (0.02, 0.02), (-0.06, 0.018), HELD),
        (AT_LEAST, (-0.1, -0.1), (-0.101, 0.2), HELD),
    ],
)
def test_a_claim_is_held_against_the_whole_interval(compare, claimed, measured, word):
    one = claim(compare=compare, low=claimed[0], high=claimed[1])
    assert verdict(one, reading(*measured), same=True) == word
    assert verdict(one, reading(*measured), same=False) == (NOT_REPRODUCED if word == DID_NOT_HOLD else word)


@pytest.mark.parametrize(
    ("source", "differs", "said"),
    [
        (SOURCE, {}, {}),
        (SOURCE, {"batch": "another"}, {"batch": "another"}),
        (Source("somebody", gpu="h100"), {}, {"GPU": "H200 instead of H100"}),
        (Source("somebody"), {}, {"GPU": "H200, the claim's is not known"}),
        (Source("somebody", gpu="h200", gpus=8), {}, {"number of GPUs": "1 instead of 8"}),
    ],
)
def test_a_claim_did_not_hold_only_where_the_same_was_measured(source, differs, said):
    found = judge(claim(cases=(Near(CASE, differs),), source=source), {"h200": {CASE.id: baseline(speedup=speed(1.1))}})
    assert found.verdict == (NOT_REPRODUCED if said else DID_NOT_HOLD)
    assert found.differs == said


def test_the_nearest_case_that_was_measured_answers_and_the_nearer_one_is_named():
    found = judge(claim(cases=(Near(CASE), Near(OTHER))), {"h200": {OTHER.id: baseline(OTHER, speedup=speed(1.4))}})
    assert (found.verdict, found.near.case) == (HELD, OTHER)
    assert found.why == (f"no baseline of {CASE.id}",)


@pytest.mark.parametrize(
    ("about", "on", "answers", "differs"),
    [
        ("h100", {"h200": [CASE], "h100": [CASE]}, ("h100", CASE), {}),
        ("h200", {"h200": [CASE], "h100": [CASE]}, ("h200", CASE), {}),
        ("h100", {"h200": [CASE], "h100": [OTHER]}, ("h200", CASE), {"GPU": "H200 instead of H100"}),
        ("", {"h200": [OTHER], "h100": [CASE]}, ("h100", CASE), {"GPU": "H100, the claim's is not known"}),
    ],
)
def test_the_nearest_case_counts_first_and_then_the_claims_own_gpu(about, on, answers, differs):
    asked = claim(cases=(Near(CASE), Near(OTHER)), source=Source("somebody", gpu=about))
    stored = {gpu: {case.id: baseline(case, speedup=speed(1.4)) for case in cases} for gpu, cases in on.items()}
    found = judge(asked, stored)
    assert (found.gpu, found.near.case, found.differs) == (*answers, differs)


def test_the_number_of_gpus_is_that_of_the_case():
    pair = Case("8b", "torchao", "rowwise", seq=8192, batch=2, gpus=2, parallel="fsdp2")
    source = Source("somebody", gpu="h200", gpus=8)
    found = judge(claim(cases=(Near(pair),), source=source), {"h200": {pair.id: baseline(pair, speedup=speed(1.4))}})
    assert found.differs == {"number of GPUs": "2 instead of 8"}


def test_where_arms_wait_for_their_host_the_gpu_s_work_answers_and_that_is_no_such_speed():
    waits = baseline(speedup=speed(0.97), busy_speedup=speed(1.1))
    found = judge(claim(source=Source("somebody", gpu="h200")), {"h200": {CASE.id: waits}})
    assert found.reading.value == pytest.approx(1.1)
    assert "wait for their host" in found.differs["time"]
    assert found.verdict == NOT_REPRODUCED, "the steps may be as fast elsewhere"


def test_the_loss_of_a_model_that_learns_too_little_answers_nothing():
    large = Case("8b", "torchao", "tensorwise")
    stored = {"h200": {large.id: baseline(large, loss_gap=[0.0, 0.001, 0.002])}}
    found = judge(claim("loss_gap", AT_MOST, 0.02, cases=(Near(large),)), stored)
    assert found.verdict == NOT_MEASURED
    page = markdown([found], stored)
    assert any("| - | not measured here |" in line and "too few weights" in line for line in page)


def test_a_baseline_of_another_definition_answers_nothing():
    old = replace(baseline(speedup=speed(1.4)), case_hash="0" * 16)
    found = judge(claim(), {"h200": {CASE.id: old}})
    assert found.verdict == NOT_MEASURED
    assert "another definition" in found.why[0]


def test_a_baseline_without_the_metric_answers_nothing():
    found = judge(claim("activation_ratio", AT_MOST, 0.5), {"h200": {CASE.id: baseline(speedup=speed(1.4))}})
    assert (found.verdict, found.why) == (NOT_MEASURED, (f"{CASE.id} has no activation_ratio",))
