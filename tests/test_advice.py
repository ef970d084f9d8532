"""What a layers message tells a user to do fits why nothing was converted, or why a layer was never called."""

from dataclasses import replace

import pytest

from helpers.evidence import CASE, HEAD, SIZES, arm_ledger, layers_evidence, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.recipes import ROLES, Reason, Stays

SIZE = Reason(Stays.SIZE, "in_features=10 is not a multiple of 16")
FILTER = Reason(Stays.LEFT, "the workload leaves '*'")
EDGE = Reason(Stays.EDGE, "Accelerate leaves the model's first Linear, for stability")


def nothing(left, originals=SIZES):
    healthy = layers_evidence(bf16=[(name, role) for name in ("q", "up") for role in ROLES])
    calls = [replace(call, fp8=False) for call in healthy.calls]
    return replace(healthy, originals=originals, skipped=left, converted=[], live_fp8=[], calls=calls)


@pytest.mark.parametrize(
    ("left", "says", "never"),
    [
        (dict.fromkeys(SIZES, SIZE), "next:     make in_features and out_features multiples of 16, or check", "leave="),
        (
            dict.fromkeys(SIZES, FILTER),
            "next:     take names or patterns out of Workload(leave=...)",
            "multiples of 16",
        ),
        (dict.fromkeys(SIZES, HEAD), "transformers' Conv1D in GPT-2, raw parameters) are never converted", "multiples"),
        (
            dict.fromkeys(SIZES, EDGE),
            "next:     give the model more Linears than a first and a last",
            "multiples of 16",
        ),
        # What a conversion of the user's own left without a reason was not meant to be left.
        ({"lm_head": HEAD}, "seen:     2 Linears could be FP8 and are not: q, up", "head"),
        ({"lm_head": HEAD}, "next:     check the conversion's filter, which must give True", "nn.Linear, or"),
        ({}, "seen:     3 Linears could be FP8 and are not: q, up, lm_head", "multiples of 16"),
    ],
)
def test_what_to_do_where_nothing_was_converted_fits_the_reasons(left, says, never):
    decision = check_layers(CASE, nothing(left))
    verdict_of(decision, Verdict.FAIL, "no layer was converted to FP8", says)
    assert never not in decision.message


def test_a_model_without_a_linear_is_told_so():
    decision = check_layers(CASE, nothing({}, originals={}))
    verdict_of(decision, Verdict.FAIL, "FP8 conversions take nn.Linear alone, and this model has none", "write its")
    assert "multiples of 16" not in decision.message


def never_called(*names, reference=False):
    """Ledgers of arms whose converted layers ``names`` are not called, but by the reference where it says so."""
    fp8 = arm_ledger(fp8_layers=["q", "up", *names])
    calls = [replace(fp8.calls[1], module=name) for name in names] if reference else []
    return TwoLedgers(arm_ledger(calls=[*fp8.calls, *calls]), fp8, "torchao")


def test_a_converted_layer_that_neither_arm_calls_is_named_in_a_pass():
    decision = check_layers(CASE, layers_evidence(), ledgers=never_called("up2"))
    verdict_of(decision, Verdict.PASS, "1 converted layer was not called in the step that was watched")
    assert "MultiheadAttention" not in decision.message


def test_torchs_attention_is_named_where_its_output_projection_is_never_called():
    ledgers = never_called("blocks.0.attn.out_proj", "blocks.1.attn.out_proj")
    decision = check_layers(CASE, layers_evidence(), ledgers=ledgers)
    verdict_of(decision, Verdict.PASS, "2 converted layers were not called", "nn.MultiheadAttention")


def test_a_converted_layer_that_the_reference_calls_must_be_called():
    decision = check_layers(CASE, layers_evidence(), ledgers=never_called("up2", reference=True))
    verdict_of(decision, Verdict.FAIL, "never called: up2", "call the layer itself")
