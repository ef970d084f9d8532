"""Arms that are alive together, and run out of memory where one is beside another."""

from __future__ import annotations

from contextlib import contextmanager

from helpers.fakes import H200, FakeProcess, install, timed
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.codes import R


def alive(world):
    return [process for process in world.processes if process.alive and process.spec is not None]


def beside_another(monkeypatch, world, operation, fails):
    """``operation`` of an arm for which ``fails`` says so ends in this while another arm is alive."""
    real = getattr(FakeProcess, operation)

    def asked(self, **arguments):
        if len(alive(world)) > 1 and fails(self):
            return crowded(arguments)
        return real(self, **arguments)

    def crowded(arguments):
        if operation == "blocks":
            return timed([100.0] * arguments["count"], retries=arguments["count"] * arguments["steps"])
        raise ArmError(R.OUT_OF_MEMORY, "no room beside the other")

    monkeypatch.setattr(FakeProcess, operation, asked)


def several_gpus(monkeypatch):
    """Fake arms on H200s, also those of several ranks."""
    return install(monkeypatch, H200)


@contextmanager
def pair_of_8b(world):
    """Both arms of a case, built together."""
    pool = ArmPool(H200)
    pair = PairArms(Case("8b", "torchao", "tensorwise"), pool, None)
    pair.start()
    assert len(alive(world)) == 2
    yield pair
    pool.close()
