"""Where two arms do not fit the GPU together, work goes by arm: how often each is built, in which order, and which
questions get the error of one that fails."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, FakeProcess, asks, install
from pytest_fp8 import ArmError
from pytest_fp8.codes import R
from pytest_fp8.options import FRESH_PAIRS

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


class Told:
    """What a session's arms were asked to, in the order in which they were built."""

    @property
    def order(self):
        return [arm for arm, _ in FakeProcess.world.residences]

    @property
    def asked(self):
        """Those that were asked something, with their operations."""
        return [(arm, operations) for arm, operations in FakeProcess.world.residences if operations]

    @property
    def alive(self):
        return sum(process.alive and process.is_built for process in FakeProcess.world.processes)


def run(pytester, *options, recipes=RECIPES[:1]):
    pytester.makepyfile(SUITE.format(recipes=recipes))
    return pytester.runpytest("--fp8-gpu=h100", *options)


@pytest.fixture
def told():
    return Told()


def test_one_case_takes_three_builds_and_one_arm_is_resident(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    result = run(pytester)
    assert result.ret == 0
    assert [arm for arm, _ in told.asked] == [REFERENCE, ARMS[0], REFERENCE]
    assert told.order == [REFERENCE, ARMS[0], REFERENCE], "a build beside the other arm that finds no room is none"
    assert told.alive == 0, "nothing is left"


def test_timing_comes_first_in_each_residence(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    run(pytester, recipes=RECIPES)
    for arm, operations in told.asked:
        timed = max(index for index, operation in enumerate(operations) if operation == "blocks")
        others = [operation for operation in operations[:timed] if operation not in ("blocks", "park")]
        between = arm == REFERENCE and told.asked[0][1] is not operations
        assert not {"layers", "ledger", "numerics"} & set(others), (arm, operations)
        assert between or not others


def test_nothing_is_asked_twice_of_the_reference(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    run(pytester, recipes=RECIPES)
    asked = [op for arm, operations in told.asked if arm == REFERENCE for op in operations]
    for once in ("layers", "ledger", "numerics", "memory", "restart", "save"):
        assert asked.count(once) == 1, once
    assert asked.count("load") == 3, "each case's checkpoint"
    for arm, operations in told.asked:
        if arm != REFERENCE:
            assert [operations.count(once) for once in ("layers", "ledger", "numerics", "memory")] == [1] * 4


@pytest.mark.parametrize(
    ("named", "order"),
    [
        ("layers or memory or numerics", [REFERENCE, *ARMS]),
        ("loss", [REFERENCE, *ARMS]),
        ("speedup", [REFERENCE, ARMS[0], REFERENCE, ARMS[1], REFERENCE, ARMS[2], REFERENCE]),
    ],
)
def test_no_more_is_built_than_the_selected_tests_need(pytester, monkeypatch, told, named, order):
    install(monkeypatch, H100)
    run(pytester, "-k", named, recipes=RECIPES)
    assert [arm for arm, _ in told.asked] == order


def test_an_update_measures_fresh_processes_and_times_each_first(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    assert run(pytester, "--fp8-update=first").ret == 0
    assert [arm for arm, _ in told.asked] == [REFERENCE, ARMS[0], REFERENCE] * FRESH_PAIRS
    assert all(operations[0] == "blocks" for _, operations in told.asked)


def fails(monkeypatch, operation, code, arm=ARMS[0]):
    """The arm ends in an error of this code when it is asked that; one that died or hung ends its process."""
    real = getattr(FakeProcess, operation)

    def failing(self, *arguments, **named):
        if self.spec.case.id == arm:
            if code in (R.ARM_DIED, R.ARM_HUNG):
                self.close()
            raise ArmError(code, f"it {code.slug} while it was asked to {operation}")
        return real(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, operation, failing)


@pytest.mark.parametrize(
    ("code", "builds"), [(R.ARM_RAISED, 3), (R.OUT_OF_MEMORY, 3), (R.ARM_DIED, 4), (R.ARM_HUNG, 4)]
)
def test_an_arm_that_fails_in_one_question_answers_the_others(pytester, monkeypatch, told, code, builds):
    install(monkeypatch, H100)
    fails(monkeypatch, "numerics", code)
    result = run(pytester)
    result.stdout.fnmatch_lines([f"*it {code.slug} while it was asked to numerics*", "*FAILED *test_numerics*"])
    result.assert_outcomes(failed=1, passed=4)
    assert len(told.order) == builds
    assert told.alive == 0


@pytest.mark.parametrize("operation", ["blocks", "layers", "save", "load"])
def test_what_several_questions_need_fails_each_of_them_and_no_other(pytester, monkeypatch, told, operation):
    install(monkeypatch, H100)
    fails(monkeypatch, operation, R.ARM_RAISED)
    result = run(pytester)
    need = {
        "blocks": {"test_speedup", "test_faster"},
        "layers": {"test_layers", "test_numerics", "test_speedup", "test_faster"},
    }.get(operation, {"test_checkpoints"})
    assert {line.split("::")[1].split("[")[0] for line in result.outlines if line.startswith("FAILED")} == need


def test_an_arm_that_cannot_be_built_gives_all_questions_its_error(pytester, monkeypatch, told):
    world = install(monkeypatch, H100)
    world.fails[ARMS[0]] = R.ARM_DIED
    result = run(pytester, recipes=RECIPES[:2])
    failed = [line for line in result.outlines if line.startswith(("FAILED", "ERROR "))]
    assert len(failed) == 7
    assert all(ARMS[0] in line for line in failed)
    assert [arm for arm, _ in told.asked].count(ARMS[1]) == 1
    assert told.alive == 0


def test_an_error_of_the_reference_is_no_evidence_for_the_next_case(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    real, left = FakeProcess.memory, [1]

    def once(self):
        if not self.is_fp8 and left:
            left.pop()
            raise ArmError(R.ARM_RAISED, "it raised once")
        return real(self)

    monkeypatch.setattr(FakeProcess, "memory", once)
    result = run(pytester, recipes=RECIPES[:2])
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert len(failed) == 1
    assert ARMS[0] in failed[0]
    assert "test_memory" in failed[0]
