"""Real arms that take turns on a CPU: what they answer is what arms that stay together answer."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("torchao")

from helpers.arms import CASE, all_end, make_batch, make_model, square
from pytest_fp8 import ArmError, Case, Verdict, Workload
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plain import to_plain
from pytest_fp8.report.record import CaseNotes, Notes
from pytest_fp8.shipping import identity

pytestmark = pytest.mark.slow

MICRO = Case("micro", "torchao", "tensorwise", emulated=True, steps=6, seeds=3)
"""Its first look decides: two seeds would leave the loss open, and the arms take one turn more."""
ASKED = ("layers", "numerics", "loss", "checkpoints")


def pair_in(pool, turns=True, case=MICRO, workload=None):
    shipped = workload.ship("a test") if workload is not None else None
    arms = PairArms(case, pool, shipped, identity(shipped) if shipped else "")
    if turns:
        pool.separate(*arms.pair)
    arms.start()
    settings = SimpleNamespace(update=False, strict=False, processes=4)
    return Fp8Pair(arms, settings, CaseNotes(Notes(), arms.case.id, "a model"), None, "file.json", asked=ASKED), arms


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """How often each arm was built."""
    seen = Counter()
    start = ArmProcess.start_build
    monkeypatch.setattr(ArmProcess, "start_build", lambda arm, spec: seen.update([spec.case.id]) or start(arm, spec))
    return seen


@pytest.mark.nightly
def test_decisions_are_those_of_arms_that_stay(built):
    together, turns = ArmPool(None), ArmPool(None)
    try:
        decisions = []
        for pool in (together, turns):
            pair, _ = pair_in(pool, pool is turns)
            decisions.append([getattr(pair, question)() for question in ASKED])
        assert to_plain(decisions[0]) == to_plain(decisions[1])
        assert built == {"micro-bf16-emulated": 1 + 2, MICRO.id: 1 + 1}
        assert len(turns.pids) == 1
    finally:
        together.close()
        turns.close()


def short_of_batches(step):
    if step == 40:
        raise RuntimeError("no batch 40")
    return make_batch(step)


def test_a_model_of_the_users_own_that_fails_in_one_question(built):
    pool = ArmPool(None)
    try:
        pair, _ = pair_in(pool, case=CASE, workload=Workload(make_model, short_of_batches, square))
        with pytest.raises(ArmError, match="no batch 40"):
            pair.loss()
        assert pair.layers().figures.fp8_share
        assert pair.checkpoints().verdict is Verdict.PASS
        assert built == {"own-bf16-emulated": 2, CASE.id: 1}
        pids = pool.pids
    finally:
        pool.close()
    assert all_end(*pids)
