"""Ranks that die, raise, hang or find no memory: one is named, and the arm fails as one. On a CPU with gloo."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from helpers.arms import all_end, call, square
from helpers.ranks import own, rank, two_ranks
from pytest_fp8 import ArmError
from pytest_fp8.arms import process
from pytest_fp8.codes import R

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh():
    with two_ranks() as arm:
        yield arm


def test_a_rank_that_dies_is_named_and_takes_the_others_along(fresh):
    fresh.build(own())
    pids = fresh.pids
    threading.Timer(0.5, os.kill, (fresh.ranks[1].pid, signal.SIGKILL)).start()
    with pytest.raises(ArmError, match=r"rank 1 of 2.*SIGKILL") as failure:
        fresh.request("curve", seed=0, steps=100_000)
    assert failure.value.code is R.ARM_DIED
    assert all_end(*pids)


def test_a_rank_that_raises_is_named_though_another_waits_for_it(fresh, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)

    def loss(model, batch):
        if rank() == 1:
            raise OverflowError("too much")
        return square(model, batch)

    pids = fresh.pids
    with pytest.raises(ArmError, match="rank 1 of 2") as failure:
        fresh.build(own(loss=loss))
    assert "OverflowError: too much" in failure.value.seen
    assert all_end(*pids)


def test_a_rank_without_memory_is_an_arm_without_memory(fresh, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1.0)

    def loss(model, batch):
        import torch

        if rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square(model, batch)

    with pytest.raises(ArmError, match=r"rank 1 of 2.*ran out of GPU memory") as failure:
        fresh.build(own(loss=loss))
    assert failure.value.code is R.OUT_OF_MEMORY


def test_ranks_that_hang_show_where_they_are(fresh):
    def loss(model, batch):
        if rank() == 1 and os.environ.get("HANGS"):
            time.sleep(600)
        return square(model, batch)

    fresh.build(own(loss=loss))
    call(fresh, lambda: os.environ.update(HANGS="1"))
    pids = fresh.pids
    with pytest.raises(ArmError, match="was stopped: ranks 0, 1") as failure:
        fresh.request("curve", timeout=3, seed=0, steps=2)
    assert failure.value.code is R.ARM_HUNG
    assert "in loss" in failure.value.seen
    assert all_end(*pids)


def test_ranks_whose_collectives_do_not_fit_together_are_told_so(fresh):
    def loss(model, batch):
        import torch

        torch.distributed.all_reduce(torch.ones(4 + rank()))
        return square(model, batch)

    with pytest.raises(ArmError, match="ranks called other collectives than each other"):
        fresh.build(own(loss=loss))
