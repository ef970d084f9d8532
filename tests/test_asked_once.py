"""What a pair's first processes have done is not asked of a further pair, which would do it again."""

from functools import partial

import pytest

from helpers.fakes import H200, FakeProcess, install
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.case import Case
from pytest_fp8.questions.asks import ledgers_of
from pytest_fp8.questions.speed.evidence import timing_for_baseline, timing_of
from pytest_fp8.questions.speed.timing import BlockTimer


class Noted(FakeProcess):
    """Remembers what it was asked."""

    every = []  # noqa: RUF012

    def request(self, operation, timeout=0, **arguments):
        self.every.append((self.spec.case.backend, operation, self.pid))
        return super().request(operation, timeout, **arguments)


@pytest.fixture
def arms(monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Noted)
    Noted.every = []
    pool = ArmPool(H200)
    pair = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    pair.start()
    yield pair
    pool.close()


def asked(operation):
    """The processes that were asked this, by the arm."""
    return {backend: pid for backend, what, pid in Noted.every if what == operation}


def test_an_update_asks_the_ledger_of_the_processes_whose_layers_took_it(arms):
    arms.run(lambda: timing_for_baseline(arms, BlockTimer(arms), 3, lambda evidence: True))
    arms.run(lambda: ledgers_of("torchao"))
    assert len({pid for _, what, pid in Noted.every if what == "blocks"}) == 6, "three pairs"
    assert asked("ledger") == asked("layers")
    assert [what for _, what, _ in Noted.every].count("ledger") == 2


def test_so_does_a_gate_that_looks_at_a_further_pair(arms):
    timer = BlockTimer(arms)
    for look in range(2):
        arms.run(partial(timing_of, arms, timer, look))
    arms.run(lambda: ledgers_of("torchao"))
    assert asked("ledger") == asked("layers")
