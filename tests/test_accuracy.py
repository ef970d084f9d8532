"""One product against the exact one and the recipe's casts; samples of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from pytest_fp8.casts import BLOCK, E4M3, E5M2, LINE, MX, SQUARE, TENSOR, Cast, promised_casts
from pytest_fp8.recipes import DGRAD, FPROP, WGRAD
from pytest_fp8.worker.record.accuracy import Expected, Operand, square_amax
from pytest_fp8.worker.record.probe import Lines
from pytest_fp8.worker.tensors import values

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scales", [TENSOR, LINE, BLOCK, SQUARE, MX])
@pytest.mark.parametrize(("name", "lowest", "highest"), [(E4M3, 30, 33), (E5M2, 24, 27)])
def test_a_cast_costs_what_its_mantissa_says(scales, name, lowest, highest):
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    squares = square_amax(values)[torch.arange(200) // 128]
    cast, underflow = Operand(values, values.abs().amax(), squares).cast(Cast(name, scales))
    noise = (cast - values).square().sum() / values.square().sum()
    assert lowest < -10 * math.log10(noise) < highest
    assert underflow < 0.01


def test_outliers_cost_a_tensors_scale_more_than_a_lines():
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    values[0] *= 1e6
    operand = Operand(values, values.abs().amax())
    assert operand.cast(Cast(E4M3, TENSOR))[1] > 0.9
    assert operand.cast(Cast(E4M3, LINE))[1] < 0.01


def test_a_product_is_compared_with_the_exact_one():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 128, generator=generator) for _ in range(2))
    expected = Expected(Operand(left, left.abs().amax()), Operand(right, right.abs().amax()), None, torch.float32)
    found = {name: float(value) for name, value in expected.compare(2 * left @ right.t()).items()}
    assert found["values"] == 64 * 64
    assert (found["gain"], found["noise"]) == (pytest.approx(2, abs=1e-5), pytest.approx(1, abs=1e-5))


def test_torchaos_casts_are_the_librarys():
    from pytest_fp8.backends.torchao import torchao_config

    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        config = torchao_config(recipe, emulated=True)
        live = {
            FPROP: (config.cast_config_input, config.cast_config_weight),
            DGRAD: (config.cast_config_grad_output, config.cast_config_weight_for_grad_input),
            WGRAD: (config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight),
        }
        for role, casts in promised_casts("torchao", recipe, {}).items():
            for cast, mine in zip(casts, live[role], strict=True):
                assert cast.format in str(mine.target_dtype)
                assert cast.scales == {"tensorwise": "tensor", "axiswise": "line"}[mine.scaling_granularity.value]
                assert cast.powers == config.round_scales_to_power_of_2


def test_rows_and_columns_of_one_size_are_drawn_each_by_their_own_number():
    lines = Lines(torch.device("cpu"))
    assert lines(64, 64).tolist() == [*range(64)]
    few = lines(64, 16).tolist()
    assert {0, 63} < set(few)
    assert 12 < len(few) <= 18
    assert lines(64, 16, draw=1).tolist() != few
    assert lines(64, 16).tolist() == few


def test_values_are_a_view_from_all_over_the_tensor():
    whole = torch.zeros(512, 512)
    values(whole, 2**10).fill_(1)
    assert 2**9 < whole.count_nonzero() <= 2**11
    assert (whole.sum(0) > 0).all(), "every column of a width that is a power of two"
