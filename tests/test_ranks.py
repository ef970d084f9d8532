"""Arms of two ranks in real processes, on a CPU with gloo: they train as one."""

from __future__ import annotations

import pytest

from helpers.ranks import micro, own, rank, two_ranks
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.record import CaseNotes, Notes

pytestmark = pytest.mark.slow

STEPS = 6
TOLD = 2e-3
"""Relative: a sum over the batch's parts rounds otherwise than one over the whole batch."""


@pytest.fixture(scope="module")
def arm():
    """Two ranks, which become one arm after another."""
    with two_ranks() as process:
        yield process


@pytest.fixture(scope="module")
def on_one():
    """Backend -> the losses of one process on the whole batch."""
    process = ArmProcess(fork=True)
    losses = {}
    for backend in ("bf16", "torchao"):
        process.build(ArmSpec(micro(backend=backend), "cpu", threads=1))
        losses[backend] = process.request("curve", seed=1, steps=STEPS)["losses"]
    process.close()
    return losses


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("backend", [pytest.param("bf16", marks=pytest.mark.nightly), "torchao"])
def test_two_ranks_train_as_one_process_on_the_whole_batch(arm, on_one, backend, parallel):
    arm.build(ArmSpec(micro(parallel, backend), "cpu", threads=1))
    curve = arm.request("curve", seed=1, steps=STEPS)
    assert curve["losses"] == pytest.approx(on_one[backend], rel=TOLD)
    assert arm.request("curve", seed=1, steps=STEPS) == curve


@pytest.mark.nightly
def test_weights_gathered_in_fp8_train_alike(arm, on_one):
    reduced = []
    for options in ({"float8_all_gather": True}, {"float8_all_gather": True, "precompute_scale": True}):
        arm.build(ArmSpec(micro("fsdp2", options=options), "cpu", threads=1))
        assert arm.request("curve", seed=1, steps=STEPS)["losses"] == pytest.approx(on_one["torchao"], rel=TOLD)
        recipes = arm.request("layers")["recipes"].values()
        assert all(recipe == {"recipe": "tensorwise", **options} for recipe in recipes)
        wire = arm.request("ledger")["wire"]
        gathers = {one["dtype"] for one in wire if one["operation"] == "all-gather"}
        assert gathers == {"bfloat16", "uint8"}, "embedding and head, and the blocks"
        reduced.append(sum(one["count"] for one in wire if one["operation"] == "all-reduce"))
    # The largest magnitude of each of 14 weights, forward and backward; or all of them before the step.
    assert reduced == [28, 0]


def test_a_workloads_own_way_to_parallelize_is_called_on_each_rank(arm):
    def parallelize(model, mesh):
        from torch.distributed.fsdp import fully_shard

        assert mesh.size() == 2
        fully_shard(model, mesh=mesh)

    def batch(step):
        import torch

        return torch.randn(32, 32)

    arm.build(own("own", parallelize=parallelize, batch=lambda step: batch(step).chunk(2)[rank()]))
    losses = arm.request("curve", seed=1, steps=STEPS)["losses"]
    single = ArmProcess(fork=True)
    try:
        alone = Case("own", "torchao", "tensorwise", emulated=True)
        single.build(ArmSpec(alone, "cpu", own(batch=batch).workload, threads=1))
        assert losses == pytest.approx(single.request("curve", seed=1, steps=STEPS)["losses"], rel=0.02)
    finally:
        single.close()


def test_ranks_that_are_given_the_same_batch_are_told_of_it():
    pool = ArmPool(None)
    try:
        spec = own()
        arms = PairArms(spec.case, pool, spec.workload)
        arms.start()
        pair = Fp8Pair(arms, Settings(), CaseNotes(Notes(), arms.case.id, "a model"), None, "")
        decision = pair.layers()
        assert decision.verdict.passes
        assert "all ranks were given one and the same batch" in decision.headline
        assert "1 all-reduce (bfloat16)" in decision.headline
    finally:
        pool.close()


BLOCKS = """
    import pytest
    import torch
    from torch import arange, distributed, nn, randn
    from pytest_fp8 import Workload

    def batch(step):
        return randn(128, 32).chunk(distributed.get_world_size())[distributed.get_rank()]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(32)
            self.register_buffer("codes", arange(4, dtype=torch.{codes}))
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
            )

        def forward(self, x):
            x = self.norm(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    @pytest.fixture
    def fp8_workload():
        return Workload(build=Net, batch=batch, loss=lambda model, x: (model(x) - x.sin()).square().mean())

    @pytest.mark.fp8(emulated=True, gpus=2, parallel={parallel!r}, steps=10)
    def test_ranks(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_numerics()
        fp8_pair.assert_checkpoints()
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_blocks_that_end_in_a_linear_and_statistics_of_each_rank_are_sound(pytester, parallel):
    """FSDP2 gathers such a block's weights only after the gradient of its output came. Running statistics differ by
    rank, and a checkpoint holds one copy. No collective takes int16."""
    pytester.makepyfile(BLOCKS.format(parallel=parallel, codes={"ddp": "int64", "fsdp2": "int16"}[parallel]))
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


def test_without_a_way_to_parallelize_the_workload_is_asked_for_one():
    with two_ranks() as arm, pytest.raises(ArmError, match="has no parallelize") as failure:
        arm.build(own("own"))
    assert "Workload(parallelize=" in failure.value.next_step
