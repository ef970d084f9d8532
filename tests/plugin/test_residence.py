"""Where two arms do not fit the GPU together, work goes by arm: how often each is built, in which order, and which
questions get the error of one that fails. What real arms answer by turns, on a CPU, is what arms that stay answer."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from helpers.arms import CASE, all_end, make_batch, make_model, square
from helpers.fakes import H100, FakeProcess, asks, built, install
from pytest_fp8 import ArmError, Case, Verdict, Workload
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.codes import R
from pytest_fp8.options import FRESH_PAIRS
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plain import to_plain
from pytest_fp8.report.record import CaseNotes, Notes
from pytest_fp8.shipping import identity

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SUITE = f"""
    import pytest
    from pytest_fp8 import Case

    CASES = [
        Case("8b", "torchao", recipe, checkpoint_formats=("safetensors",), resume=False)
        for recipe in {{recipes}}
    ]
{asks("layers", "numerics", "loss", "speedup", "faster", "memory", "checkpoints")}"""
REFERENCE, ARMS = "8b-bf16", [f"8b-torchao-{recipe}" for recipe in RECIPES]
ANSWERED = {"layers", "numerics", "loss", "faster", "checkpoints"}
"""Without a baseline the other two are not."""


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H100)


def run(pytester, *options, recipes=RECIPES[:1]):
    pytester.makepyfile(SUITE.format(recipes=recipes))
    return pytester.runpytest("--fp8-gpu=h100", *options)


def asked(world):
    """The arms that were asked something, with their operations, in the order in which they were built."""
    return [(arm, operations) for arm, operations in world.residences if operations]


def failed(result):
    """(what a test asked, its case) of those that failed, or whose set-up did."""
    lines = [line.split("::test_")[1] for line in result.outlines if line.startswith(("FAILED", "ERROR "))]
    return [tuple(line.split("]")[0].split("[")) for line in lines]


def test_each_case_builds_its_arm_and_the_reference_once_more_times_first_and_asks_nothing_twice(pytester, world):
    assert run(pytester, recipes=RECIPES).ret == 0
    order = [REFERENCE, ARMS[0], REFERENCE, ARMS[1], REFERENCE, ARMS[2], REFERENCE]
    assert [arm for arm, _ in asked(world)] == order
    assert len(world.residences) == len(order), "a build beside the other arm that finds no room is none"
    assert not built(world), "nothing is left"
    once = ("layers", "ledger", "numerics", "memory")
    for number, (arm, operations) in enumerate(asked(world)):
        timed = max(index for index, operation in enumerate(operations) if operation == "blocks")
        others = [operation for operation in operations[:timed] if operation not in ("blocks", "park")]
        assert not {"layers", "ledger", "numerics"} & set(others), (arm, operations)
        assert not others or (arm == REFERENCE and number > 0)
        assert arm == REFERENCE or [operations.count(each) for each in once] == [1] * 4
    of_reference = Counter(op for arm, operations in asked(world) if arm == REFERENCE for op in operations)
    assert [of_reference[each] for each in (*once, "restart", "save")] == [1] * 6
    assert of_reference["load"] == 3, "each case's checkpoint"


@pytest.mark.parametrize(
    ("named", "order"),
    [
        ("layers or memory or numerics", [REFERENCE, *ARMS]),
        ("loss", [REFERENCE, *ARMS]),
        ("speedup", [REFERENCE, ARMS[0], REFERENCE, ARMS[1], REFERENCE, ARMS[2], REFERENCE]),
    ],
)
def test_no_more_is_built_than_the_selected_tests_need(pytester, world, named, order):
    run(pytester, "-k", named, recipes=RECIPES)
    assert [arm for arm, _ in asked(world)] == order


def test_an_update_measures_fresh_processes_and_times_each_first(pytester, world):
    assert run(pytester, "--fp8-update=first").ret == 0
    assert [arm for arm, _ in asked(world)] == [REFERENCE, ARMS[0], REFERENCE] * FRESH_PAIRS
    assert all(operations[0] == "blocks" for _, operations in asked(world))


@pytest.mark.parametrize(
    ("operation", "code", "builds", "need"),
    [
        ("numerics", R.ARM_RAISED, 3, {"numerics"}),
        ("numerics", R.OUT_OF_MEMORY, 3, {"numerics"}),
        ("numerics", R.ARM_DIED, 4, {"numerics"}),
        ("numerics", R.ARM_HUNG, 4, {"numerics"}),
        ("blocks", R.ARM_RAISED, 3, {"speedup", "faster"}),
        ("layers", R.ARM_RAISED, 3, {"layers", "numerics", "speedup", "faster"}),
        ("save", R.ARM_RAISED, 3, {"checkpoints"}),
        ("load", R.ARM_RAISED, 3, {"checkpoints"}),
    ],
)
def test_an_arm_that_fails_in_one_question_answers_those_that_do_not_need_it(
    pytester, monkeypatch, world, operation, code, builds, need
):
    """One that died or hung ends its process."""
    real = getattr(FakeProcess, operation)

    def failing(self, *arguments, **named):
        if self.spec.case.id == ARMS[0]:
            if code in (R.ARM_DIED, R.ARM_HUNG):
                self.close()
            raise ArmError(code, f"it {code.slug} while it was asked to {operation}")
        return real(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, operation, failing)
    result = run(pytester)
    result.stdout.fnmatch_lines([f"*it {code.slug} while it was asked to {operation}*"])
    assert {question for question, _ in failed(result)} == need
    result.assert_outcomes(failed=len(need), passed=len(ANSWERED - need))
    assert len(world.residences) == builds
    assert not built(world)


def test_an_arm_that_cannot_be_built_gives_all_questions_its_error(pytester, world):
    world.fails[ARMS[0]] = R.ARM_DIED
    assert [case for _, case in failed(run(pytester, recipes=RECIPES[:2]))] == [ARMS[0]] * 7
    assert [arm for arm, _ in asked(world)].count(ARMS[1]) == 1
    assert not built(world)


def test_an_error_of_the_reference_is_no_evidence_for_the_next_case(pytester, monkeypatch, world):
    real, left = FakeProcess.memory, [1]

    def once(self):
        if not self.is_fp8 and left:
            left.pop()
            raise ArmError(R.ARM_RAISED, "it raised once")
        return real(self)

    monkeypatch.setattr(FakeProcess, "memory", once)
    assert failed(run(pytester, recipes=RECIPES[:2])) == [("memory", ARMS[0])]


# -- real arms, on a CPU ----------------------------------------------------------------------------------------------

MICRO = Case("micro", "torchao", "tensorwise", emulated=True, steps=6, seeds=3)
"""Its first look decides: two seeds would leave the loss open, and the arms take one turn more."""
ASKED = ("layers", "numerics", "loss", "checkpoints")


@pytest.fixture
def builds(monkeypatch):
    """How often each arm was built."""
    pytest.importorskip("torchao")
    seen = Counter()
    start = ArmProcess.start_build
    monkeypatch.setattr(ArmProcess, "start_build", lambda arm, spec: seen.update([spec.case.id]) or start(arm, spec))
    return seen


@pytest.fixture
def pair_in(builds):
    """``pair_in(case, ...)``: a pair in a pool of its own, whose arms take turns or stay."""
    pools = []

    def made(case, workload=None, turns=True):
        shipped = workload.ship("a test") if workload is not None else None
        pools.append(ArmPool(None))
        arms = PairArms(case, pools[-1], shipped, identity(shipped) if shipped else "")
        if turns:
            arms.pool.separate(*arms.pair)
        arms.start()
        settings = SimpleNamespace(update=False, strict=False, processes=4)
        notes = CaseNotes(Notes(), case.id, "a model")
        return Fp8Pair(arms, settings, notes, None, "file.json", asked=ASKED), arms.pool

    yield made
    for pool in pools:
        pool.close()


@pytest.mark.slow
@pytest.mark.nightly
def test_decisions_are_those_of_arms_that_stay(pair_in, builds):
    (together, _), (turns, pool) = pair_in(MICRO, turns=False), pair_in(MICRO)
    decisions = [[to_plain(getattr(pair, question)()) for question in ASKED] for pair in (together, turns)]
    assert decisions[0] == decisions[1]
    assert builds == {"micro-bf16-emulated": 1 + 2, MICRO.id: 1 + 1}
    assert len(pool.pids) == 1


def short_of_batches(step):
    if step == 40:
        raise RuntimeError("no batch 40")
    return make_batch(step)


@pytest.mark.slow
def test_a_model_of_the_users_own_that_fails_in_one_question(pair_in, builds):
    pair, pool = pair_in(CASE, Workload(make_model, short_of_batches, square))
    with pytest.raises(ArmError, match="no batch 40"):
        pair.loss()
    assert pair.layers().figures.fp8_share
    assert pair.checkpoints().verdict is Verdict.PASS
    assert builds == {"own-bf16-emulated": 2, CASE.id: 1}
    pids = pool.pids
    pool.close()
    assert all_end(*pids)
