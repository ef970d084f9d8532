"""Weights that start a curve one rounding away: how far they are moved, in any layout and type."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_fp8.worker.state import seed_weights  # noqa: E402

pytestmark = pytest.mark.slow

ROUNDING = 2.0**-8


def moved(target, value, seed=0):
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(target))
    seed_weights.copy_values(model, {"weight": value}, {}, seed)
    return model.weight.detach().clone()


LAYOUTS = {
    "plain": lambda dtype: torch.empty(40, 60, dtype=dtype),
    "transposed": lambda dtype: torch.empty(60, 40, dtype=dtype).t(),
    "of one dimension": lambda dtype: torch.empty(2400, dtype=dtype),
    "a column": lambda dtype: torch.empty(2400, 2, dtype=dtype)[:, 0],
    "none": lambda dtype: torch.empty(0, 3, dtype=dtype),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("part", [7, 1 << 24])
def test_each_is_moved_by_at_most_one_rounding_and_each_by_another(monkeypatch, layout, dtype, part):
    monkeypatch.setattr(seed_weights, "PART", part)
    target = LAYOUTS[layout](dtype)
    value = torch.ones(target.shape, dtype=torch.bfloat16)
    found = moved(target.clone(), value)
    away = (found.float() - 1).abs()
    assert found.dtype == dtype
    assert not away.numel() or ROUNDING / 2 < away.max() <= ROUNDING
    # As many of them are moved, and in as many ways, as their type can show: none of the parts repeats another.
    ways = 2 if dtype is torch.bfloat16 else min(2300, found.numel())
    assert len(found.unique()) >= min(ways, found.numel())
    assert found.equal(moved(target.clone(), value))
    assert not found.numel() or not found.equal(moved(target.clone(), value, seed=1))
    assert value.eq(1).all()
