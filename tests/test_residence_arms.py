"""Arms that take turns on a CPU, by a rule that says so: what they answer is what arms that stay together answer."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torchao")

from helpers.arms import CASE, all_end, make_batch, make_model, square
from pytest_fp8 import ArmError, Case, Verdict, Workload
from pytest_fp8.arms.coroutines import NAME
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plain import to_plain
from pytest_fp8.report.record import Notes
from pytest_fp8.shipping import identity

pytestmark = pytest.mark.slow

MICRO = Case("micro", "torchao", "tensorwise", emulated=True, steps=6, seeds=2)
ASKED = ("layers", "numerics", "loss", "checkpoints")


def pair_in(pool, case=MICRO, workload=None):
    shipped = workload.ship("a test") if workload is not None else None
    arms = PairArms(case, pool, shipped, identity(shipped) if shipped else "")
    arms.start()
    settings = SimpleNamespace(update=False, strict=False, processes=4)
    return Fp8Pair(arms, settings, Notes().of(arms.case.id, "a model"), None, "file.json", asked=ASKED)


def taking_turns():
    return ArmPool(None, turns=lambda case, gpu: True)


def evidence_of(pair):
    gathered = [
        pair.layers_evidence(),
        pair.ledgers(),
        pair.numerics_evidence(),
        pair.loss_evidence(),
        pair.checkpoint_evidence(),
    ]
    verdicts = [getattr(pair, question)().verdict for question in ASKED]
    return [to_plain(each) for each in gathered], verdicts


def builds(pool):
    return {arm: len(each) for arm, each in pool.stopwatch.builds.items()}


@pytest.mark.nightly
def test_evidence_and_verdicts_are_those_of_arms_that_stay():
    together, turns = ArmPool(None), taking_turns()
    try:
        stayed, verdicts = evidence_of(pair_in(together))
        took, others = evidence_of(pair_in(turns))
        assert took == stayed
        assert others == verdicts
        assert builds(together) == {"micro-bf16-emulated": 1, MICRO.id: 1}
        assert builds(turns) == {"micro-bf16-emulated": 2, MICRO.id: 1}
        assert len(turns.pids) == 1
    finally:
        together.close()
        turns.close()


def short_of_batches(step):
    if step == 40:
        raise RuntimeError("no batch 40")
    return make_batch(step)


def test_a_model_of_the_users_own_that_fails_in_one_question():
    pool = taking_turns()
    try:
        pair = pair_in(pool, CASE, Workload(make_model, short_of_batches, square))
        with pytest.raises(ArmError, match="no batch 40"):
            pair.loss_evidence()
        assert pair.layers_evidence().converted
        assert pair.checkpoints().verdict is Verdict.PASS
        assert builds(pool) == {"own-bf16-emulated": 2, CASE.id: 1}
        pids = pool.pids
    finally:
        pool.close()
    assert all_end(*pids)


def test_ctrl_c_while_an_arm_works_ends_the_arm_and_all_that_gathers():
    pool = taking_turns()
    pair = pair_in(pool)
    timer = threading.Timer(1.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    pids = set()

    def work():
        pair.bf16.request("park")
        pids.update(pool.pids)
        timer.start()
        pair.bf16.request("curve", seed=0, steps=100_000)

    try:
        with pytest.raises(KeyboardInterrupt):
            pair.bf16.pool.residences.gather({"one": work, "two": lambda: pair.fp8.request("park")})
        assert all_end(*pids), "its late answer must not be read as another one's"
    finally:
        pool.close()
        timer.join()
    assert NAME not in [thread.name for thread in threading.enumerate()]
