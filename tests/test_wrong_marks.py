"""Marks that are wrong: each names the test, what was expected and the next step, and is shown once."""

import pytest

from helpers.marks import TWICE, collect


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("@pytest.mark.fp8(bakend='torchao')", "has no argument 'bakend'"),
        ("@pytest.mark.fp8('torchao')", "takes keyword arguments only"),
        ("@pytest.mark.fp8(question='sped')", "unknown question 'sped'"),
        ("@pytest.mark.fp8(backend='cuda')", "unknown FP8 backend 'cuda'"),
        ("@pytest.mark.fp8(recipe='block')", "has no recipe 'block'"),
        ("@pytest.mark.fp8(cases=[], recipe='rowwise')", "cases= beside the fields of a case"),
        ("@pytest.mark.fp8(cases=[pytest_fp8.Case('9b', 'torchao', 'rowwise')])", "unknown model '9b'"),
        ("@pytest.mark.fp8(model='1b')", "has no argument 'model'"),
        ("@pytest.mark.fp8(backend='transformer_engine', recipe='delayed', options={'margn': 1})", "no option 'margn'"),
    ],
)
def test_a_mark_that_is_wrong_names_the_test(pytester, mark, says):
    result = collect(pytester, mark)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*{says}*"])


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("bakend='torchao'", "did you mean 'backend'?"),
        ("'torchao', 'rowwise'", "@pytest.mark.fp8(backend='torchao', recipe='rowwise')"),
        ("backend='torcho'", "did you mean 'torchao'?"),
        ("backend='cuda'", "backend='torchao' or backend='transformer_engine' ('te')*"),
        ("recipe='tensor_wise'", "did you mean 'tensorwise'?"),
        ("recipe='delayed'", "recipe='tensorwise', or backend='transformer_engine', which has 'delayed'"),
        ("model='tiny'", "cases=[[]pytest_fp8.Case('tiny', 'torchao', 'tensorwise')]"),
        ("loss_seeds=8", "seeds=8"),
        ("chip='hopper'", "cases=[[]pytest_fp8.Case('own', 'torchao', 'tensorwise', chip='hopper')]"),
        ("question='sped'", "did you mean 'speedup'?"),
        ("backend='te', recipe='delayed', options={'margn': 1}", "did you mean 'margin'?"),
    ],
)
def test_a_name_that_is_unknown_comes_with_the_next_step(pytester, mark, says):
    result = collect(pytester, f"@pytest.mark.fp8({mark})")
    result.stdout.fnmatch_lines([f"*next: *{says}"])


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("emulated='yes'", "True or False"),
        ("emulated=1", "True or False"),
        ("steps='4'", "a whole number from 1"),
        ("seeds=-1", "a whole number from 1"),
        ("gpus=True", "a whole number"),
        ("tolerance='2%'", "a fraction between 0 and 1"),
        ("tolerance=float('nan')", "a fraction between 0 and 1"),
        ("options=['margin']", "a dict with names as keys"),
        ("recipe=None", "a text"),
        ("name=3", "a text"),
        ("name=200 * 'x', emulated=True", "at most 200 characters, which name its row and its baseline"),
        ("cases='tiny'", "a list of pytest_fp8.Case, or the fields of one case"),
        ("cases=1", "a list of pytest_fp8.Case, or the fields of one case"),
    ],
)
def test_an_argument_of_another_type_is_refused(pytester, mark, expected):
    result = collect(pytester, f"@pytest.mark.fp8({mark})")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_mine*", f"*expected: {expected}", "*seen:*", "*next:*"])


@pytest.mark.parametrize("given", ["recipe=[]", "backend=()", "cases=[]", "cases=()"])
@pytest.mark.parametrize("question", ["", ", question='loss'"])
def test_a_mark_with_an_empty_list_is_refused(pytester, given, question):
    result = collect(pytester, f"@pytest.mark.fp8({given}{question})")
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    name = given.partition("=")[0]
    result.stdout.fnmatch_lines(["*test_mine names no case", f"*seen: *{name}=[[]]", f"*next: *take {name}=[[]] out*"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("floor=-1", "floor of a case"),
        ("floor=0", "floor of a case"),
        ("floor=float('inf')", "floor of a case"),
        ("floor=float('nan')", "floor of a case"),
        ("recipe=['tensorwise', 'tensorwise']", "case own-torchao-tensorwise twice"),
        ("backend=['te', 'transformer_engine'], recipe='delayed'", "case own-te-delayed twice"),
    ],
)
def test_what_would_have_no_meaning_is_refused(pytester, given, says):
    result = collect(pytester, f"@pytest.mark.fp8({given})")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_mine: {says}", "*expected: *", "*seen: *"])


def test_a_question_that_no_case_answers_is_refused(pytester):
    result = collect(pytester, "@pytest.mark.fp8(question='memory', emulated=True)")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_mine asks 'memory' of no case", "*seen: *own-torchao-tensorwise-emulated"])


def test_the_next_step_is_a_value_of_the_field(pytester):
    for given, meant in (
        ("gpus='8'", "gpus=1"),
        ("tolerance='2%'", "tolerance=0.02"),
        ("options=2", "options={'...': ...}"),
    ):
        collect(pytester, f"@pytest.mark.fp8({given})").stdout.fnmatch_lines([f"*next: *{meant}"])


@pytest.mark.oldest
def test_a_test_that_names_no_case_says_how(pytester):
    pytester.makepyfile("def test_mine(fp8_pair): pass")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*expected: @pytest.mark.fp8(*"])


def test_a_mark_that_is_wrong_is_shown_once(pytester):
    result = collect(pytester, "@pytest.mark.fp8(bakend='torchao')")
    assert result.stdout.str().count("has no argument 'bakend'") == 1
    result.stdout.no_fnmatch_line(f"*{TWICE}*")


def test_a_test_without_a_mark_does_not_begin_with_an_empty_name(pytester):
    pytester.makepyfile("def test_mine(fp8_pair): pass")
    result = pytester.runpytest()
    result.stdout.fnmatch_lines(
        ["*ERROR at setup of test_mine*", "FP8-R25: this test asks for an FP8 case and names none"]
    )
    result.stdout.fnmatch_lines(["*seen:*", "*cause:*", "*next:*"])


@pytest.mark.oldest
def test_a_mark_on_a_parameter_is_refused_by_name(pytester):
    pytester.makepyfile(
        """
        import pytest

        ROWWISE = pytest.param(2, marks=pytest.mark.fp8(name="large", recipe="rowwise"))

        @pytest.mark.fp8(emulated=True)
        @pytest.mark.parametrize("width", [1, ROWWISE])
        def test_mine(fp8_case, width): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*has a mark fp8 on a parameter*", "*seen: *name='large', recipe='rowwise'*"])
