"""A case and the mark that names it: what a case keeps, its id and digest, cases that cannot be; how a mark's arguments
multiply and go before each other, the order of a case's tests, wrong marks and unread ones, and a slice of a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest

from helpers.fakes import H100, TWICE
from pytest_fp8 import Case, SettingsError
from pytest_fp8 import gpu as gpus
from pytest_fp8.baselines.store import baseline_path
from pytest_fp8.codes import R
from pytest_fp8.markers import ARGUMENTS, cases_of
from pytest_fp8.options import Settings

# -- a case -----------------------------------------------------------------------------------------------------------

USUAL = Case("1b", "te", "delayed")
SHARDED = {"gpus": 2, "parallel": "fsdp2"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"options": {"amax_history_len": 16}}, "1b-te-delayed-amax_history_len.16"),
        ({"batch": 8}, "1b-te-delayed-8x2048"),
        ({"seq": 512}, "1b-te-delayed-4x512"),
        ({"batch": 2, "seq": 8}, "1b-te-delayed-2x8"),
        ({"gpus": 2, "parallel": "ddp"}, "1b-te-delayed-ddp.2"),
        ({"backend": "torchao", "recipe": "tensorwise", **SHARDED}, "1b-torchao-tensorwise-fsdp2.2"),
        ({"lora": 8, "lora_targets": ("q proj",)}, "1b-te-delayed-lora8.q_proj.89f8bc"),
    ],
)
def test_what_changes_a_number_is_in_the_id_and_in_the_digest(fields, name):
    other = replace(USUAL, **fields)
    assert other.id == name
    assert other.digest() != USUAL.digest()


@pytest.mark.parametrize(
    "fields", [{"backend": "transformer_engine"}, {"options": {"margin": 0}}, {"chip": "hopper"}, {"tolerance": 0.1}]
)
def test_what_changes_no_number_is_in_neither(fields):
    other = replace(USUAL, **fields)
    assert (other.id, other.digest()) == (USUAL.id, USUAL.digest())
    assert {USUAL: 1, replace(USUAL): 2} == {USUAL: 2}


def test_the_digests_of_stored_baselines_stay():
    alone = Case("1b", "torchao", "tensorwise")
    assert alone.digest() == "6b917883fa056b2b"
    assert replace(alone, **SHARDED).reference().id == "1b-bf16-fsdp2.2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "torchao", "recipe": "rowwise", "gpus": 2},
        {"backend": "torchao", "recipe": "rowwise", "parallel": "ddp"},
        {"backend": "torchao", "recipe": "rowwise", "gpus": 2, "parallel": "fsdp3"},
        {"backend": "torchao", "recipe": "rowwise", "gpus": 2, "parallel": "own"},
        {"backend": "torchao", "recipe": "rowwise", "gpus": 3, "parallel": "ddp"},
        {"backend": "torchao", "recipe": "rowwise", "gpus": 2, "parallel": "zero3"},
        {"backend": "accelerate_te", "recipe": "delayed", "gpus": 2, "parallel": "ddp"},
        {"backend": "torchao", "recipe": "tensorwise", "options": {"float8_all_gather": True}},
        {"backend": "transformer_engine", "recipe": "current", "emulated": True},
        {"backend": "transformer_engine", "recipe": "delayed", "options": {"amax_history_len": "16"}},
        {"backend": "torchao", "recipe": "rowwise", "tolerance": 3},
        {"backend": "torchao", "recipe": "rowwise", "chip": "volta"},
        {"backend": "torchao", "recipe": "rowwise", "checkpoint_formats": ("dpc",)},
        {"backend": "torchao", "recipe": "rowwise", "checkpoint_formats": ()},
        {"backend": "torchao", "recipe": "rowwise", "checkpoint_formats": "dcp"},
    ],
)
def test_a_case_that_cannot_be_is_refused(wrong):
    with pytest.raises(SettingsError, match="expected"):
        Case(model="tiny", **wrong)


def test_emulated_cases_never_answer_for_speed_or_memory():
    case = Case("tiny", "torchao", "rowwise", emulated=True)
    assert not case.asks("speedup")
    assert not case.asks("memory")
    assert case.asks("loss")


NAMES = ("größe", "grüße", "a b", "a_b", "a/b", "a__b", "vit", "vit.2", "v-1", "")


def test_names_that_differ_give_ids_that_differ(tmp_path):
    found = {name: Case("own", "torchao", "rowwise", name=name).id for name in NAMES}
    assert len(set(found.values())) == len(NAMES)
    for name, case in found.items():
        assert baseline_path(tmp_path, "h200", case).stem == case, "it names a baseline"
        assert case.startswith("own.gr__e.") == (name in ("größe", "grüße"))


def test_one_case_has_one_id():
    """1 is equal to True, and stands in an id as another word. A list becomes the tuple that a case keeps."""
    assert Case("tiny", "torchao", "rowwise", questions=["layers"]).questions == ("layers",)
    for option, value in (("float8_all_gather", 1), ("float8_all_gather", "True"), ("precompute_scale", 1.0)):
        with pytest.raises(SettingsError, match=option):
            Case("tiny", "torchao", "tensorwise", options={option: value}, gpus=2, parallel="fsdp2")
    for option in ("amax_history_len", "margin"):
        with pytest.raises(SettingsError, match=option):
            Case("1b", "te", "delayed", options={option: True})


# -- a mark -----------------------------------------------------------------------------------------------------------


def collect(pytester, mark):
    """A session of one test. A wrong mark does not interrupt it: pytest would write out where it was, for half a second
    that nobody reads."""
    pytester.makepyfile(f"import pytest\nimport pytest_fp8\n{mark}\ndef test_mine(fp8_case): pass")
    return pytester.runpytest("--strict-markers", "--continue-on-collection-errors")


def ids(pytester, code):
    pytester.makepyfile(f"import pytest\n{code}")
    lines = pytester.runpytest("--collect-only", "-q").outlines
    return [line.split("[")[1].rstrip("]") for line in lines if "::" in line]


BACKENDS, RECIPES = ["torchao", "accelerate_torchao"], ["tensorwise", "rowwise"]
TWO_LISTS = f"@pytest.mark.fp8(backend={BACKENDS})\n@pytest.mark.fp8(recipe={RECIPES})\n"
OF_A_MODULE = "pytestmark = pytest.mark.fp8(name='mine', recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')\n"
ONE_BACKEND = "@pytest.mark.fp8(backend=['te', 'transformer_engine'], recipe='delayed')\n"


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("marks", "found"),
    [
        (TWO_LISTS, [f"own-{backend.replace('_', '.')}-{recipe}" for backend in BACKENDS for recipe in RECIPES]),
        (OF_A_MODULE, ["own.mine-torchao-tensorwise"]),
        (ONE_BACKEND, ["own-te-delayed"]),
    ],
    ids=["lists multiply", "a function goes before its module", "a value twice is one case"],
)
def test_the_cases_of_a_mark(pytester, marks, found):
    assert sorted(ids(pytester, marks + "def test_mine(fp8_case): pass")) == sorted(found)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (
            "@pytest.mark.fp8(recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')",
            ["FP8-R24: two marks*test_mine give recipe=", "*next:*recipe=[[]*"],
        ),
        ("@pytest.mark.fp8('torchao')", ["*too many positional arguments*"]),
    ],
)
def test_a_mark_that_is_wrong_is_an_error_of_its_test_and_shown_once(pytester, mark, says):
    result = collect(pytester, mark)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(says)
    assert sum(fnmatch(line, says[0]) for line in result.outlines) == 1
    result.stdout.no_fnmatch_line(f"*{TWICE}*")


@pytest.mark.oldest
def test_a_user_s_own_empty_list_of_cases_is_skipped_as_pytest_does(pytester):
    result = collect(pytester, "@pytest.mark.parametrize('fp8_case', [], indirect=True)")
    result.assert_outcomes(skipped=1)


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
def test_a_mark_that_nothing_reads_is_told(pytester):
    """On a parameter; or on a unittest's method, about whose arguments pytest asks no plugin."""
    pytester.makepyfile(
        """
        import unittest, pytest

        ROWWISE = pytest.param(2, marks=pytest.mark.fp8(name="large", recipe="rowwise"))

        @pytest.mark.fp8(emulated=True)
        @pytest.mark.parametrize("width", [1, ROWWISE])
        def test_mine(fp8_case, width): pass

        class TestMine(unittest.TestCase):
            @pytest.mark.fp8(emulated=True)
            def test_method(self): ...

        @pytest.mark.parametrize("width", [ROWWISE])
        def test_other(width): ...

        @pytest.mark.fp8_script(["python", "train.py"], fp8=["--fp8"])
        def test_script(): ...
        """
    )
    assert pytester.runpytest("-Wdefault").parseoutcomes() == {"passed": 5, "warnings": 4}
    result = pytester.runpytest("--fp8-strict")
    result.stdout.fnmatch_lines([f"{R.MARK_UNREAD}: test_mine*", "*seen: *the mark on a parameter*"])
    result.stdout.fnmatch_lines([f"{R.MARK_UNREAD}: test_method*", "*seen: *unittest*"])
    result.assert_outcomes(passed=1, errors=4)


def test_a_slice_of_a_gpu_is_none_of_its_kind():
    sliced = replace(H100, name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert sliced.key == "nvidia-h100-80gb-hbm3-mig-1g-10gb"
    assert not gpus.is_kind(sliced, "h100")
    assert gpus.is_kind(sliced, "hopper")
