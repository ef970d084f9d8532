"""Marks that are wrong: each names the test, what was expected and the next step, and is shown once."""

import pytest

from helpers.marks import TWICE, collect
from pytest_fp8 import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import SettingsError
from pytest_fp8.markers import cases_of
from pytest_fp8.options import Settings

TINY = Case("tiny", "torchao", "rowwise")


@pytest.mark.parametrize(
    ("code", "given", "says"),
    [
        (R.BAD_MARK, {"bakend": "torchao"}, "unexpected keyword argument 'bakend'"),
        (R.BAD_MARK, {"model": "1b"}, "pytest_fp8.Case(...)"),
        (R.BAD_MARK, {"cases": [TINY], "recipe": "rowwise"}, "recipe='rowwise'"),
        (R.BAD_MARK, {"cases": "tiny"}, "cases='tiny'"),
        (R.BAD_MARK, {"cases": 1}, "cases=1"),
        (R.UNKNOWN_NAME, {"question": "sped"}, "did you mean 'speedup'?"),
        (R.UNKNOWN_NAME, {"backend": "torcho"}, "did you mean 'torchao'?"),
        (R.UNKNOWN_NAME, {"backend": "cuda"}, "backend='torchao' or backend='transformer_engine' ('te')"),
        (R.UNKNOWN_NAME, {"recipe": "delayed"}, "backend='transformer_engine', which has 'delayed'"),
        (R.UNKNOWN_NAME, {"backend": "te", "recipe": "delayed", "options": {"margn": 1}}, "did you mean 'margin'?"),
        (R.BAD_VALUE, {"emulated": 1}, "expected: True or False"),
        (R.BAD_VALUE, {"steps": "4"}, "expected: a whole number from 1"),
        (R.BAD_VALUE, {"seeds": -1}, "expected: a whole number from 1"),
        (R.BAD_VALUE, {"gpus": True}, "next:     gpus=1"),
        (R.BAD_VALUE, {"tolerance": "2%"}, "next:     tolerance=0.02"),
        (R.BAD_VALUE, {"tolerance": float("nan")}, "expected: a fraction between 0 and 1"),
        (R.BAD_VALUE, {"floor": float("inf")}, "floor of a case"),
        (R.BAD_VALUE, {"floor": 0}, "floor of a case"),
        (R.BAD_VALUE, {"options": ["margin"]}, "next:     options={'...': ...}"),
        (R.BAD_VALUE, {"recipe": None}, "expected: a text"),
        (R.BAD_VALUE, {"name": 3}, "expected: a text"),
        (R.NO_CASE, {"recipe": []}, "an empty list"),
        (R.NO_CASE, {"cases": (), "question": "loss"}, "an empty list"),
        (R.NO_CASE, {"question": "memory", "emulated": True}, "seen:     own-torchao-tensorwise-emulated"),
    ],
    ids=repr,
)
def test_a_mark_that_is_wrong_names_the_test_and_the_next_step(code, given, says):
    with pytest.raises(SettingsError) as error:
        cases_of("test_x.py::test_mine", [(None, pytest.mark.fp8(**given).mark)], Settings())
    assert error.value.code is code
    assert "test_x.py::test_mine" in error.value.headline
    assert says in error.value.message
    assert error.value.next_step or error.value.expected


def test_a_value_twice_in_a_list_is_one_case():
    (case,) = cases_of(
        "a_test", [(None, pytest.mark.fp8(backend=["te", "transformer_engine"], recipe="delayed").mark)], Settings()
    )
    assert case.id == "own-te-delayed"


def test_a_mark_that_is_wrong_is_an_error_of_its_test_and_shown_once(pytester):
    result = collect(pytester, "@pytest.mark.fp8('torchao')")
    result.assert_outcomes(errors=1)
    assert result.stdout.str().count("too many positional arguments") == 1
    result.stdout.no_fnmatch_line(f"*{TWICE}*")


@pytest.mark.oldest
def test_a_test_that_names_no_case_says_how(pytester):
    pytester.makepyfile("def test_mine(fp8_pair): pass")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at setup of test_mine*", "FP8-R25: this test asks for an FP8 case and names none"]
    )
    result.stdout.fnmatch_lines(["*expected: @pytest.mark.fp8(*", "*seen:*", "*cause:*", "*next:*"])


@pytest.mark.oldest
def test_a_mark_on_a_parameter_is_told(pytester):
    pytester.makepyfile(
        """
        import pytest

        ROWWISE = pytest.param(2, marks=pytest.mark.fp8(name="large", recipe="rowwise"))

        @pytest.mark.fp8(emulated=True)
        @pytest.mark.parametrize("width", [1, ROWWISE])
        def test_mine(fp8_case, width): pass
        """
    )
    pytester.runpytest("-Wignore").assert_outcomes(passed=2)
    result = pytester.runpytest("--fp8-strict")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*has a mark fp8 that is not read*", "*seen: *the mark on a parameter*"])
