"""What a PASS of the layers question names besides: Linears of odd sizes that weigh something, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import CASE, HEAD, layers_evidence, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.beside import beside
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.recipes import Reason, Stays


def odd(size, side="out_features"):
    return Reason(Stays.SIZE, f"{side}={size} is not a multiple of 16")


def notes(originals, skipped):
    evidence = replace(layers_evidence(), originals=originals, skipped=skipped)
    return beside(CASE, evidence, evidence.step(), None)


def test_linears_of_odd_sizes_are_named_with_their_sizes():
    originals = {"0": (64, 250), "2": (250, 256), "4": (256, 64)}
    skipped = {"0": odd(250), "2": odd(250, "in_features")}
    assert notes(originals, skipped) == [
        "2 of 3 Linears stay in BF16: 0, 2 "
        "(out_features=250 is not a multiple of 16, in_features=250 is not a multiple of 16)"
    ]


@pytest.mark.parametrize(
    ("originals", "skipped"),
    [
        pytest.param({"q": (64, 64), "head": (64, 250)}, {"head": HEAD}, id="head"),
        pytest.param(
            {"q": (64, 64), "r": (64, 64)}, {"r": Reason(Stays.LEFT, "the workload leaves 'r'")}, id="asked for"
        ),
        pytest.param(
            {"q": (64, 64), "r": (64, 64)}, {"r": Reason(Stays.EDGE, "the first Linear")}, id="a library's rule"
        ),
        pytest.param({"q": (64, 250), "r": (64, 64)}, {"q": Reason(Stays.ADAPTER, "LoRA matrices stay")}, id="adapter"),
        pytest.param({"q": (64, 512), "r": (64, 5)}, {"r": odd(5)}, id="a small router"),
    ],
)
def test_what_stays_as_it_should_is_not_named(originals, skipped):
    assert notes(originals, skipped) == []


def test_a_pattern_that_matches_nothing_is_named():
    evidence = layers_evidence(unmatched=["*.ruoter"])
    [note] = beside(CASE, evidence, evidence.step(), None)
    assert note == "leave='*.ruoter' matches no Linear"


def test_a_pass_keeps_its_notes_in_headline_and_numbers():
    decision = check_layers(CASE, layers_evidence(stacked_weights={"experts": [4, 64, 64]}))
    verdict_of(decision, Verdict.PASS, "; not in FP8, since no Linear holds them: experts")
    assert decision.numbers["notes"] == ["not in FP8, since no Linear holds them: experts"]
    assert check_layers(CASE, layers_evidence()).numbers["notes"] == []
