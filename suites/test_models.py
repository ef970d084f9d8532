"""Are the two variants of a model the same but for FP8?"""

import pytest

from pytest_fp8 import Case

CASES = [
    Case("micro", "torchao", "tensorwise", emulated=True),
    Case("tiny", "torchao", "tensorwise", chip="hopper"),
    Case("tiny", "transformer_engine", "delayed", chip="hopper"),
]
LIBRARY = {"torchao": "torchao.float8", "transformer_engine": "transformer_engine.pytorch"}

pytestmark = pytest.mark.fp8(cases=CASES, question="layers")


def fp8_layers(model, backend):
    """Names of the layers whose class is the library's, or a subclass of one."""
    library = LIBRARY[backend]
    return {
        name
        for name, layer in model.named_modules()
        if any(kind.__module__.startswith(library) and "Linear" in kind.__name__ for kind in type(layer).__mro__)
    }


def test_fp8_layers_are_there_and_hold_the_weights_of_bf16(fp8_case, bf16_model, fp8_model):
    """All Linears of the blocks, and no other; each with its BF16 sister's weight to the bit."""
    converted = fp8_layers(fp8_model, fp8_case.backend)
    linears = {name for name, layer in bf16_model.named_modules() if type(layer).__name__ == "Linear"}
    assert converted == linears - {"lm_head"}
    assert not fp8_layers(bf16_model, fp8_case.backend)
    for name, weight in bf16_model.named_parameters():
        assert fp8_model.get_parameter(name).equal(weight)
