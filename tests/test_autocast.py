"""Float32 weights under autocast: in both arms, seen by the FP8 layers, and refused where a library holds others."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.loops import CASE, batch, build, loop, serve
from pytest_fp8 import Case
from pytest_fp8.errors import SettingsError

pytestmark = pytest.mark.slow
UNDER = replace(CASE, autocast=True)


def test_it_is_in_a_case_s_name_and_hash_where_it_is_asked_and_of_the_reference_too():
    plain, under = (Case("micro", "torchao", "tensorwise", emulated=True, autocast=on) for on in (False, True))
    assert under.id == "micro-torchao-tensorwise-emulated-autocast"
    assert under.digest() != plain.digest()
    assert under.reference().autocast


@pytest.mark.parametrize(
    "more", [{"backend": "unsloth", "recipe": "rowwise", "lora": 8}, {"gpus": 2, "parallel": "zero3", "compile": False}]
)
def test_it_is_refused_where_weights_are_of_another_type(more):
    with pytest.raises(SettingsError, match="float32 weights under autocast"):
        Case(**{"model": "tiny", "backend": "torchao", "recipe": "tensorwise", **more}, autocast=True)


@pytest.mark.parametrize("case", [UNDER, UNDER.reference()], ids=["fp8", "bf16"])
@pytest.mark.parametrize("step", [None, loop()], ids=["loss", "step"])
def test_a_users_float32_stays_and_products_are_of_bfloat16(case, step):
    """torchao's layer asks for the autocast of a GPU, on a CPU too."""
    import torch

    def loss(model, rows):
        output = model(rows)
        assert (rows.dtype, output.dtype) == (torch.float32, torch.bfloat16)
        return output.float().square().mean()

    engine = serve(case, build=build, batch=batch, **({"step": step} if step else {"loss": loss})).engine
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    assert {value.dtype for state in engine.optimizer.state.values() for value in state.values()} == {torch.float32}
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")
