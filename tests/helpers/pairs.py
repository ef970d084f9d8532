"""A case's two arms, alive, in stand-in processes on a GPU that is not there."""

from __future__ import annotations

from contextlib import contextmanager

from helpers.fakes import install
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool


@contextmanager
def live_pair(monkeypatch, gpu, case):
    install(monkeypatch, gpu)
    pool = ArmPool(gpu)
    pair = PairArms(case, pool, None)
    pair.start()
    yield pair
    pool.close()
