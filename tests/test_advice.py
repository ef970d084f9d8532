"""What a layers message tells a user to do fits why nothing was converted, or why a layer was never called."""

import pytest

from helpers.evidence import CASE, SIZES, layers_evidence, verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.questions.layers.check import check_layers

SIZE = "size: in_features=10 is not a multiple of 16"
HEAD = "head: output projections stay in high precision"
FILTER = "filter: the workload leaves '*'"
EDGE = "edge: Accelerate leaves the model's {} Linear, for stability"


def nothing(left, originals=SIZES):
    return layers_evidence(originals=originals, skipped=left, converted=[], live_fp8=[])


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
        ({"lm_head": HEAD}, "check how FP8 is switched on", "every nn.Linear of the model"),
        ({}, "next:     check how FP8 is switched on", "multiples of 16"),
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


def never_called(*names):
    sizes = dict.fromkeys(["q", *names], (64, 64))
    made = layers_evidence()
    calls = [call for call in made.calls if call.name == "q"]
    return layers_evidence(
        originals=sizes, converted=list(sizes), skipped={}, live_fp8=list(sizes), calls=calls, bypassed=list(names)
    )


def test_torchs_attention_is_named_where_its_output_projection_was_never_called():
    decision = check_layers(CASE, never_called("blocks.0.attn.out_proj", "blocks.1.attn.out_proj"))
    verdict_of(decision, Verdict.FAIL, "nn.MultiheadAttention", "Workload(leave=('*.out_proj',))")
    assert "call the layer itself" not in decision.message


def test_other_layers_that_were_never_called_are_told_to_be():
    decision = check_layers(CASE, never_called("up"))
    verdict_of(decision, Verdict.FAIL, "call the layer itself")
    assert "MultiheadAttention" not in decision.message
    both = check_layers(CASE, never_called("up", "attn.out_proj"))
    verdict_of(both, Verdict.FAIL, "call the layer itself", "for out_proj, where that is torch's: Workload(leave=('*.")
