"""The marker: how its arguments multiply and go before each other, and the order of a case's tests."""

import re

import pytest

from helpers.marks import collect, ids
from pytest_fp8.markers import ARGUMENTS

BACKENDS, RECIPES = ["torchao", "accelerate_torchao"], ["tensorwise", "rowwise"]


@pytest.mark.oldest
def test_a_user_s_own_empty_list_of_cases_is_skipped_as_pytest_does(pytester):
    result = collect(pytester, "@pytest.mark.parametrize('fp8_case', [], indirect=True)")
    result.assert_outcomes(skipped=1)


@pytest.mark.oldest
def test_lists_multiply_as_parametrize_does(pytester):
    code = f"@pytest.mark.fp8(backend={BACKENDS})\n@pytest.mark.fp8(recipe={RECIPES})\n"
    found = ids(pytester, code + "def test_mine(fp8_case): pass")
    assert sorted(found) == sorted(f"own-{b.replace('_', '.')}-{r}" for b in BACKENDS for r in RECIPES)


def test_two_marks_at_one_place_that_give_one_argument_are_refused(pytester):
    result = collect(pytester, "@pytest.mark.fp8(recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["FP8-R24: two marks*test_mine give recipe=", "*next:*recipe=[[]...] or backend=[[]...] in one mark*"]
    )


@pytest.mark.oldest
def test_the_mark_of_a_function_wins_over_that_of_its_module(pytester):
    code = "pytestmark = pytest.mark.fp8(name='mine', recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')\n"
    assert ids(pytester, code + "def test_mine(fp8_case): pass") == ["own.mine-torchao-tensorwise"]


def test_the_marker_is_registered(pytester):
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.fp8(*"])
    assert not [name for name in ARGUMENTS if not re.search(rf"\b{name}\b", result.stdout.str())]


@pytest.mark.oldest
def test_tests_of_one_case_come_together_and_presence_comes_first(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case
        A, B = Case("tiny", "torchao", "rowwise", emulated=True), Case("tiny", "torchao", "tensorwise", emulated=True)

        @pytest.mark.fp8(cases=[B], question="checkpoints")
        def test_checkpoints(fp8_case): ...

        @pytest.mark.fp8(cases=[A, B], question="layers")
        def test_layers(fp8_case): ...
        """
    )
    lines = pytester.runpytest("--collect-only", "-q").outlines[:3]
    assert [line.split("::")[1] for line in lines] == [
        "test_layers[tiny-torchao-tensorwise-emulated]",
        "test_checkpoints[tiny-torchao-tensorwise-emulated]",
        "test_layers[tiny-torchao-rowwise-emulated]",
    ]
