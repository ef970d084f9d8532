"""Tensors of which each rank holds a part, in a group of one rank: what is said of them and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_fp8.worker.notes import weights_of

pytestmark = pytest.mark.slow


@pytest.fixture
def sharded(tmp_path):
    """A Linear whose weight is sharded, and whose bias is not."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(4, 4)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        yield model
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("inner", [["_local_tensor"], ["_local_tensor", "_spec"]], ids=["one part", "two parts"])
def test_a_weight_of_which_each_rank_holds_another_part_has_no_digest(sharded, monkeypatch, inner):
    """torch versions differ in what a DTensor says it is made of. Ranks would differ in the digest of their parts."""
    monkeypatch.setattr(DTensor, "__tensor_flatten__", lambda self: (inner, None))
    seen = weights_of(sharded)
    assert seen["weight"].digest == ""
    assert seen["weight"].shape == (4, 4)
    assert len(seen["bias"].digest) == 16
