"""The marker: how its arguments multiply and go before each other, the order of a case's tests, and cases for which
there is no GPU, or a slice of one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, TWICE, install
from pytest_fp8 import Case
from pytest_fp8 import gpu as gpus
from pytest_fp8.codes import R
from pytest_fp8.errors import SettingsError
from pytest_fp8.markers import ARGUMENTS, cases_of, why_not
from pytest_fp8.options import Settings

BACKENDS, RECIPES = ["torchao", "accelerate_torchao"], ["tensorwise", "rowwise"]


def collect(pytester, mark, *arguments):
    """A session of one test. A wrong mark does not interrupt it: pytest would write out where it was, for half a second
    that nobody reads."""
    pytester.makepyfile(f"import pytest\nimport pytest_fp8\n{mark}\ndef test_mine(fp8_case): pass")
    return pytester.runpytest("--strict-markers", "--continue-on-collection-errors", *arguments)


def ids(pytester, code):
    pytester.makepyfile(f"import pytest\n{code}")
    lines = pytester.runpytest("--collect-only", "-q").outlines
    return [line.split("[")[1].rstrip("]") for line in lines if "::" in line]


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
    result.stdout.fnmatch_lines(["FP8-R24: two marks*test_mine give recipe=", "*next:*recipe=[[]*"])


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
        (R.BAD_VALUE, {"gpus": True}, "expected: a whole number"),
        (R.BAD_VALUE, {"tolerance": "2%"}, "such as 0.02"),
        (R.BAD_VALUE, {"tolerance": float("nan")}, "expected: a fraction between 0 and 1"),
        (R.BAD_VALUE, {"options": ["margin"]}, "keys: {'...': ...}"),
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


def test_a_mark_that_nothing_reads_is_told(pytester):
    """pytest asks no plugin about the arguments of a unittest's method."""
    pytester.makepyfile(
        """
        import unittest, pytest

        class TestMine(unittest.TestCase):
            @pytest.mark.fp8(emulated=True)
            def test_mine(self): ...

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.fp8(emulated=True))])
        def test_other(x): ...
        """
    )
    result = pytester.runpytest("-W", "default")
    result.stdout.fnmatch_lines([f"*{R.MARK_UNREAD}*"])
    assert result.parseoutcomes()["warnings"] == 2


# -- a host with too few GPUs, and slices of one ---------------------------------------------------------------------


DECLARED = Settings(gpu="h200")


def test_too_few_gpus_say_what_helps(monkeypatch):
    install(monkeypatch, H200)
    case = Case("tiny", "torchao", "tensorwise", gpus=2, parallel="ddp")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "CUDA programs see 1; -k 'not ddp.2' leaves such cases out" in why_not(case, DECLARED)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert not why_not(case, DECLARED)[0]


def test_a_slice_of_a_gpu_is_none_of_its_kind():
    sliced = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert sliced.key == "nvidia-h100-80gb-hbm3-mig-1g-10gb"
    assert not gpus.is_kind(sliced, "h100")
    assert gpus.is_kind(sliced, "hopper")
