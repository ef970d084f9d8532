"""Ranks that keep each other waiting or do not fit together: what is said of them, and that all end."""

from __future__ import annotations

import os
import time

import pytest

from helpers.arms import all_end, call, square
from helpers.ranks import own, rank, two_ranks
from pytest_fp8 import ArmError
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.ranks import hung
from pytest_fp8.codes import R

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh():
    with two_ranks() as process:
        yield process


def test_a_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(fresh):
    def loss(model, batch):
        if rank() == 1 and os.environ.get("HANGS"):
            time.sleep(600)
        return square(model, batch)

    fresh.build(own(loss=loss))
    call(fresh, lambda: os.environ.update(HANGS="1"))
    pids = fresh.pids
    with pytest.raises(ArmError, match="rank 1 hangs, and rank 0 waits for it") as failure:
        fresh.request("curve", timeout=3, seed=0, steps=2)
    assert failure.value.code is R.ARM_HUNG
    assert "in loss" in failure.value.seen
    assert all_end(*pids)


def stack(*calls):
    return "\n".join(["Current thread 0x00007f (most recent call first):", *(f'  File "{call}' for call in calls)])


TRAINING = ('/home/me/train.py", line 9 in loss', '/site/pytest_fp8/worker/training/step.py", line 80 in run_step')
DDP_FORWARD = stack('/site/torch/nn/parallel/distributed.py", line 1775 in _pre_forward', *TRAINING)
COLLECTIVE = stack('/site/torch/distributed/distributed_c10d.py", line 3 in all_reduce', *TRAINING)
BACKWARD = stack('/site/torch/autograd/graph.py", line 8 in _engine_run_backward', *TRAINING)
ON_THE_GPU = stack('/site/torch/cuda/__init__.py", line 1040 in synchronize', *TRAINING)
BELOW_A_WRAPPER = stack(
    '/home/me/train.py", line 30 in forward',
    '/site/torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py", line 172 in forward',
    '/site/torch/nn/parallel/distributed.py", line 1 in forward',
)
IN_THE_BACKWARD_PASS = stack(
    '/home/me/train.py", line 31 in backward',
    '/site/torch/autograd/function.py", line 315 in apply',
    '/site/torch/autograd/graph.py", line 8 in _engine_run_backward',
)


@pytest.mark.parametrize("slow", [BELOW_A_WRAPPER, IN_THE_BACKWARD_PASS, stack(*TRAINING), ""])
@pytest.mark.parametrize("waiting", [DDP_FORWARD, COLLECTIVE, BACKWARD, ON_THE_GPU])
def test_the_rank_that_hangs_is_where_its_innermost_call_is(slow, waiting):
    tails = {0: waiting, 1: waiting, 2: "a line of its own\n" + slow, 3: waiting}
    error = hung("an arm", "build", 9.0, 4, tails)
    assert "rank 2 hangs, and ranks 0, 1, 3 wait for it" in error.headline
    assert error.seen.startswith("the end of the output of rank 2:\na line of its own")


@pytest.mark.parametrize("tails", [[COLLECTIVE] * 3, [stack(*TRAINING), COLLECTIVE, stack(*TRAINING)]])
def test_no_rank_is_named_where_the_stacks_do_not_say_which_began(tails):
    error = hung("an arm", "build", 9.0, 3, dict(enumerate(tails)))
    assert "ranks 0, 1, 2 gave none, and their stacks do not say which of them began" in error.headline


def test_ranks_whose_collectives_do_not_fit_together_are_told_so(fresh):
    def loss(model, batch):
        import torch

        torch.distributed.all_reduce(torch.ones(4 + rank()))
        return square(model, batch)

    with pytest.raises(ArmError, match="called other collectives than each other, or with other sizes") as failure:
        fresh.build(own(loss=loss))
    assert "mismatch" in failure.value.seen
    assert "a rank that goes another way" in failure.value.cause


@pytest.mark.nightly
def test_a_torchrun_around_pytest_is_not_that_of_the_ranks(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    arm = ArmProcess(fork=True, device="cpu", ranks=2)
    try:
        arm.build(own())
    finally:
        arm.close()
