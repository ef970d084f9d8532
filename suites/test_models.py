"""Which layers are FP8, and are the two variants of a model the same but for them?"""

import pytest

from matrix import LOOP, MOE, VIT
from pytest_fp8 import Case
from pytest_fp8.questions.asks import fp8_layers
from workloads import EXPERTS, MICRO_BATCHES

CASES = [
    Case("micro", "torchao", "tensorwise", emulated=True),
    Case("tiny", "torchao", "tensorwise", chip="hopper"),
    Case("tiny", "transformer_engine", "delayed", chip="hopper"),
]
LIBRARY = {"torchao": "torchao.float8", "transformer_engine": "transformer_engine.pytorch"}


def layers_of(model, backend):
    """Names of the layers whose class is the library's, or a subclass of one."""
    library = LIBRARY[backend]
    return {
        name
        for name, layer in model.named_modules()
        if any(kind.__module__.startswith(library) and "Linear" in kind.__name__ for kind in type(layer).__mro__)
    }


@pytest.mark.fp8(cases=CASES, question="layers")
def test_fp8_layers_are_there_and_hold_the_weights_of_bf16(fp8_case, bf16_model, fp8_model):
    """All Linears of the blocks, and no other; each with its BF16 sister's weight to the bit."""
    converted = layers_of(fp8_model, fp8_case.backend)
    linears = {name for name, layer in bf16_model.named_modules() if type(layer).__name__ == "Linear"}
    assert converted == linears - {"lm_head"}
    assert not layers_of(bf16_model, fp8_case.backend)
    for name, weight in bf16_model.named_parameters():
        assert fp8_model.get_parameter(name).equal(weight)


@pytest.mark.fp8(cases=VIT, question="layers")
def test_the_classifier_and_the_patches_stay_and_all_else_is_fp8(fp8_pair):
    decision = fp8_pair.assert_layers()
    assert decision.numbers["skipped"] == {"head: output projections stay in high precision": 1}
    assert fp8_pair.evidence(fp8_layers).skipped.keys() == {"classifier"}


@pytest.mark.fp8(cases=MOE, question="layers")
def test_the_router_stays_with_its_reason_and_each_expert_is_fp8(fp8_pair):
    decision = fp8_pair.assert_layers()
    assert decision.numbers["skipped"] == {"size: out_features=5 is not a multiple of 16": 2}
    assert decision.numbers["converted"] == 2 + 2 * 2 * EXPERTS


RECOMPUTED = Case("micro", "torchao", "tensorwise", activation_checkpointing=True, questions=("layers",), emulated=True)


@pytest.mark.fp8(cases=[RECOMPUTED, *LOOP], question="layers")
def test_each_product_of_a_step_is_owed_and_runs_in_fp8(fp8_pair):
    """Seven Linears in each of the two blocks of micro."""
    recomputes = fp8_pair.case.activation_checkpointing
    role, count = ("recompute", 14) if recomputes else ("wgrad", 14 * MICRO_BATCHES)
    told = fp8_pair.assert_layers().numbers["roles"][role]
    assert told == {"expected": count, "fp8": count} or not fp8_pair.case.emulated
