"""The plan of a session: the order of its builds, and about how long it takes."""

from __future__ import annotations

import pytest

import matrix
from helpers.fakes import H100, H200, install
from pytest_fp8 import Case
from pytest_fp8.arms.memory_plan import CONTEXT_BYTES, GIB, peak_bytes, resident_bytes
from pytest_fp8.session_plan import ANSWERS, BUILD, BUSY, CACHED, plan_session

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ALL = frozenset({"layers", "numerics", "loss", "speedup", "memory", "checkpoints"})
REFERENCE = "8b-bf16"
FIRST, SECOND, THIRD = (f"8b-torchao-{recipe}" for recipe in RECIPES)


def cases(model, questions=ALL):
    return [(Case(model, "torchao", recipe), frozenset(questions)) for recipe in RECIPES]


SHORT = frozenset({"layers", "speedup"})


def at(base, more):
    """Seconds of 8B, given those of a model of no size and of 1e9 parameters."""
    return base + more * 8.03


def order(plan):
    return [" and ".join(each.arms) for each in plan.builds]


@pytest.mark.parametrize(
    ("questions", "builds"),
    [
        (ALL, [REFERENCE, FIRST, REFERENCE, SECOND, REFERENCE, THIRD, REFERENCE]),
        ({"checkpoints"}, [REFERENCE, FIRST, REFERENCE, SECOND, REFERENCE, THIRD, REFERENCE]),
        ({"layers", "memory"}, [REFERENCE, FIRST, SECOND, THIRD]),
    ],
)
def test_arms_that_take_turns_are_planned_as_they_are_built(questions, builds):
    plan = plan_session(cases("8b", questions), H100)
    assert order(plan) == builds
    assert plan.turns == ["8b"]


def test_arms_that_fit_stay_and_small_ones_are_built_at_once():
    assert order(plan_session(cases("8b"), H200)) == [REFERENCE, FIRST, SECOND, THIRD]
    small = [f"1b-torchao-{recipe}" for recipe in RECIPES]
    assert order(plan_session(cases("1b"), H100)) == [f"1b-bf16 and {small[0]}", *small[1:]]


@pytest.mark.parametrize("gpus", [4, 8])
def test_what_is_published_fits_four_and_eight_gpus_of_80_gb(gpus):
    sharded = [case for case in matrix.PUBLISHED if case.gpus == gpus]
    plan = plan_session([(case, frozenset(case.questions)) for case in sharded], H100)
    assert order(plan) == [sharded[0].reference().id, *(case.id for case in sharded)]
    assert (plan.turns, plan.too_large) == ([], [])
    assert 180 < plan.seconds < 420, "three cases of 8B: four builds, half of the questions"
    gib = {4: 67, 8: 61}[gpus]
    assert [round(peak_bytes(case) / GIB) for case in sharded] == [gib] * 3


@pytest.mark.parametrize(("gpus", "gib"), [(1, 100), (2, 78)])
def test_fewer_gpus_of_80_gb_do_not_hold_or_hardly_hold_what_is_published(gpus, gib):
    cases = [case for case in matrix.PUBLISHED if case.gpus == gpus]
    plan = plan_session([(case, frozenset(case.questions)) for case in cases], H100)
    assert (plan.too_large, plan.turns) == ([case.id for case in cases if gpus == 1], [])
    assert {round(peak_bytes(case) / GIB) for case in cases} == {gib}


def test_an_update_times_several_pairs():
    assert len(plan_session(cases("8b"), H100, processes=4).builds) == 3 * 12 - 2
    assert len(plan_session(cases("8b", {"layers"}), H100, processes=4).builds) == 4


def test_what_is_too_large_is_tried_once():
    plan = plan_session([(Case("8b", "transformer_engine", "current"), ALL)], H100, processes=2)
    assert order(plan) == ["8b-te-current"]
    assert plan.seconds == pytest.approx(BUILD[0] + 8.03 * BUILD[1], rel=0.01), "it answers nothing"
    assert "probably too large for it: 8b-te-current" in plan.line()


def test_an_8b_case_takes_what_its_builds_and_answers_take():
    plan = plan_session(cases("8b", SHORT)[:1], H100)
    answers = 2 * at(*ANSWERS["layers"]) + at(*ANSWERS["speedup"])
    assert plan.seconds == pytest.approx(2 * at(*BUILD) + at(*CACHED) + answers, rel=0.01)
    assert plan.line().startswith("fp8: 1 case(s), 3 arm(s) to build, about 2 min; the arms of 8b take turns: 79 GiB")


def test_the_core_on_an_h100_takes_what_a_gate_took():
    """A gate took 1056 s there."""
    core = [*matrix.TINY, *matrix.ONE_B, *matrix.EIGHT_B]
    plan = plan_session([(case, frozenset(case.questions)) for case in core], H100)
    assert 900 < plan.seconds < 1200


@pytest.mark.parametrize(
    ("more", "per_parameter"),
    [
        ({}, 6),
        ({"gpus": 2, "parallel": "ddp"}, 6),
        ({"gpus": 2, "parallel": "fsdp2"}, 3),
        ({"gpus": 2, "parallel": "zero3", "backend": "accelerate_torchao", "compile": False}, 7),
        ({"gpus": 2, "parallel": "fsdp2", "backend": "accelerate_torchao"}, 6),
        ({"gpus": 2, "parallel": "ddp", "backend": "accelerate_torchao"}, 6),
    ],
)
def test_what_a_gpu_holds_depends_on_how_weights_are_shared(more, per_parameter):
    case = Case("1b", more.pop("backend", "torchao"), "tensorwise", **more)
    assert resident_bytes(case) == pytest.approx(1.24e9 * per_parameter + CONTEXT_BYTES, rel=0.01)


def test_models_of_ones_own_have_the_least_that_any_takes():
    plan = plan_session([(Case("own", "torchao", "tensorwise"), frozenset({"layers"}))], H100)
    assert order(plan) == ["own-bf16 and own-torchao-tensorwise"]
    assert plan.seconds == pytest.approx(BUILD[0] + 2 * ANSWERS["layers"][0])


def test_what_models_of_ones_own_take_is_known_once_an_arm_has_trained():
    own, planned = Case("own", "torchao", "tensorwise", loss_steps=20, loss_seeds=3), cases("8b")[0]
    plan = plan_session([(own, frozenset({"layers", "loss"})), planned], H100)
    knowing = plan.knowing({own.id: 0.5, FIRST: 100.0, "own-bf16": 0.5})
    # 20 steps of three seeds, in FP8, in BF16 and once more a rounding away.
    assert knowing.of(own.id) == pytest.approx(plan.of(own.id) + 0.5 * 20 * 3 * 3)
    assert knowing.of(FIRST) == plan.of(FIRST), "what is planned by size stays"
    assert plan.knowing({}).seconds == plan.seconds
    assert " min and as long as own models train" in plan.line()
    without = plan_session([(own, frozenset({"layers"}))], H100)
    assert without.knowing({own.id: 0.5}).seconds == without.seconds


def test_the_plan_says_what_is_left_of_it():
    plan = plan_session(cases("8b")[:2], H100)
    both = [FIRST, SECOND]
    assert plan.left(both, FIRST, 0.0) == pytest.approx(plan.seconds)
    assert plan.left(both, FIRST, 10.0) == pytest.approx(plan.seconds - 10)
    of_the_second = plan.left(both[1:], SECOND, 0.0)
    assert plan.left(both, FIRST, 1e6) == pytest.approx(of_the_second), "the first takes longer than planned"
    assert plan.left(both[1:], SECOND, 1e6) == 0.0


def test_what_is_left_goes_by_how_long_cases_took():
    plan = plan_session(cases("8b")[:3], H100)
    first, *others = [case.id for case, _ in cases("8b")[:3]]
    assert plan.pace({}) == 1.0
    assert plan.pace({first: plan.of(first)}) == pytest.approx(1.0)
    slow = plan.pace({first: 4 * plan.of(first)})
    assert 2 < slow < 4, "one case says something of the others, and not all"
    assert plan.pace({first: 0.0}) == 1.0, "it failed at once"
    assert plan.pace({first: 1e6, others[0]: 1e6}) > slow
    left = sum(map(plan.of, others))
    assert plan.left(others, others[0], 0.0, slow) == pytest.approx(slow * left)
    assert plan.pace({"test_unplanned": 1e6, "": 1e6}) == 1.0


SUITE = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("8b", "torchao", "tensorwise"), Case("tiny", "torchao", "tensorwise", emulated=True)])
    def test_mine(fp8_pair):
        pass
"""


def test_the_session_says_it_before_the_first_test(pytester, monkeypatch):
    world = install(monkeypatch, H100)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("--fp8-gpu=h100", "--collect-only")
    result.stdout.fnmatch_lines(["collected 2 items", "fp8: 1 case(s), 3 arm(s) to build, about * min; *"])
    result.stdout.no_fnmatch_line("*1. 8b-bf16*")
    verbose = pytester.runpytest("--fp8-gpu=h100", "--collect-only", "-v")
    verbose.stdout.fnmatch_lines(["*1. 8b-bf16: build about * s, *", "*2. 8b-torchao-tensorwise: *"])
    assert not world.processes


def test_without_a_gpu_and_when_quiet_it_says_nothing(pytester, monkeypatch):
    install(monkeypatch, None)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--collect-only").stdout.no_fnmatch_line("fp8: *case(s)*")
    install(monkeypatch, H100)
    pytester.runpytest("--collect-only", "-q").stdout.no_fnmatch_line("fp8: *case(s)*")


def test_an_update_is_planned_with_the_blocks_of_each_pair_and_busy_times():
    asked = frozenset({"layers", "speedup", "memory"})

    def further(case, gpu):
        one, two = (sum(each.answers for each in plan_session([(case, asked)], gpu, pairs).builds) for pairs in (1, 2))
        return two - one

    assert further(Case("1b", "torchao", "tensorwise"), H200) == pytest.approx(16 + 2 * BUSY, abs=2)
    assert further(Case("8b", "torchao", "tensorwise"), H100) == pytest.approx(23, abs=2), "arms in turns have none"


def test_an_update_of_ranks_is_planned_with_what_it_took_on_two_h100s():
    """Two pairs of processes of half of 8B's layers took about 210 s a case after the first one."""
    ranks = {"batch": 4, "seq": 4096, "gpus": 2, "parallel": "fsdp2"}
    asked = frozenset({"layers", "speedup", "memory"})
    cases = [(Case("8b16", "torchao", recipe, **ranks), asked) for recipe in ("tensorwise", "rowwise")]
    plan = plan_session(cases, H100, processes=2)
    second = sum(each.build + each.answers for each in plan.builds if each.case == cases[1][0].id)
    assert second == pytest.approx(210, rel=0.25)
