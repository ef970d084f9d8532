"""Weights that start a curve one rounding away: how far they are moved, in any layout and type."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_fp8.worker.state.weights import ROUNDING, copy_values  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", [torch.empty(40, 60), torch.empty(60, 40).t()], ids=["plain", "transposed"])
def test_each_is_moved_by_at_most_one_rounding_and_each_by_another(target, dtype):
    def moved(seed):
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight = torch.nn.Parameter(target.to(dtype, copy=True))
        copy_values(model, {"weight": torch.ones(40, 60, dtype=torch.bfloat16).to(dtype)}, seed)
        return model.weight.detach()

    found = moved(0)
    assert ROUNDING / 2 < (found.float() - 1).abs().max() <= ROUNDING
    assert len(found.unique()) >= (2 if dtype is torch.bfloat16 else 2300), "as many ways as the type can show"
    assert found.equal(moved(0))
    assert not found.equal(moved(1))
