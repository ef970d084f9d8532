"""Sessions whose tests ask one case after the other: which arms are built ahead, and when."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, install


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


SESSION = """
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("1b", "torchao", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
"""

BUILDING = """
    def begun():
        from helpers.fakes import FakeProcess
        return {each.spec.case.id for each in FakeProcess.world.processes if each.alive and each.spec is not None}

    def building():
        from helpers.fakes import FakeProcess
        return sorted(begun() - {*FakeProcess.world.built})
"""


def test_a_session_begins_what_comes_next_and_asks_each_arm_once(pytester, world):
    pytester.makepyfile(
        SESSION
        + BUILDING
        + """
    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()

    @pytest.mark.fp8(cases=CASES, question="memory")
    def test_memory(fp8_pair):
        if fp8_pair.case.recipe == "tensorwise":
            assert "1b-torchao-rowwise" in begun()
        fp8_pair.assert_memory()
"""
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] == 3, "of the memory there is no baseline"
    assert sorted(world.built) == sorted(set(world.built))
    assert len(world.built) == 4


ALL_IN_ONE = """
    @pytest.mark.fp8(cases=CASES)
    def test_all(fp8_pair):
        before = begun()
        fp8_pair.assert_faster()
        fp8_pair.layers()
        if fp8_pair.case.recipe == "tensorwise":
            assert before == {"1b-bf16", "1b-torchao-tensorwise"}
            assert "1b-torchao-rowwise" in begun()
"""

SPEED_ALONE = """
    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        if fp8_pair.case.recipe == "tensorwise":
            assert building() == ["1b-torchao-rowwise", "1b-torchao-rowwise_with_gw_hp"]
        fp8_pair.assert_faster()
"""


@pytest.mark.parametrize("tests", [ALL_IN_ONE, SPEED_ALONE])
def test_arms_are_built_ahead_whatever_a_test_asks(pytester, world, tests):
    pytester.makepyfile(SESSION + BUILDING + tests)
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=3)
    assert len(world.built) == 4


def test_a_test_that_asks_no_arms_waits_for_builds_and_has_none_begun_for_it(pytester, world):
    pytester.makepyfile(
        SESSION
        + BUILDING
        + """
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="tensorwise", question="memory")
    def test_memory(fp8_pair):
        assert building() == ["1b-bf16", "1b-torchao-tensorwise"]
        fp8_pair.memory()

    def test_of_ones_own():
        assert building() == []

    @pytest.mark.fp8(cases=CASES[:1])
    def test_later(fp8_pair):
        fp8_pair.memory()

    @pytest.mark.fp8(cases=CASES[1:])
    def test_no_arms(fp8_case):
        assert building() == []
"""
    )
    assert pytester.runpytest("--fp8-gpu=h200").parseoutcomes() == {"passed": 3, "not": 2}, "not exercised"
    assert not [name for name in world.built if "rowwise" in name]
