"""The marker: keyword arguments only, unknown ones named with the test, cases brought together."""

import importlib.util
import re
from dataclasses import replace

import pytest

from pytest_fp8 import Case, SettingsError
from pytest_fp8.baselines.store import baseline_path
from pytest_fp8.markers import ARGUMENTS, with_weights
from pytest_fp8.options import Settings


def test_a_case_s_own_weights_go_before_those_of_the_option(tmp_path):
    case, settings = Case("tiny", "torchao", "rowwise"), Settings(weights={"tiny": tmp_path / "option"})
    assert with_weights(case, settings).weights == str(tmp_path / "option")
    assert with_weights(replace(case, model="1b"), settings).weights is None
    assert with_weights(replace(case, weights=tmp_path), settings).weights == str(tmp_path)


def test_one_name_is_no_two_folders_of_weights(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", weights=f) for f in ("/a", "/b")])
        def test_it(fp8_pair):
            pass
        """
    )
    for more in ((), ("--collect-only",)):
        result = pytester.runpytest(*more)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["ERROR: two cases are named tiny-torchao-rowwise*", "*weights='/a' and*'/b'"])


def collect(pytester, mark, *arguments):
    pytester.makepyfile(f"import pytest\n{mark}\ndef test_mine(fp8_case): pass")
    return pytester.runpytest("--strict-markers", *arguments)


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("@pytest.mark.fp8(bakend='torchao')", "has no argument 'bakend'"),
        ("@pytest.mark.fp8('torchao')", "takes keyword arguments only"),
        ("@pytest.mark.fp8(question='sped')", "unknown question 'sped'"),
        ("@pytest.mark.fp8(backend='cuda')", "unknown FP8 backend 'cuda'"),
        ("@pytest.mark.fp8(recipe='block')", "has no recipe 'block'"),
        ("@pytest.mark.fp8(cases=[], model='1b')", "either cases"),
        ("@pytest.mark.fp8(model='9b')", "unknown model '9b'"),
        ("@pytest.mark.fp8(backend='transformer_engine', recipe='delayed', options={'margn': 1})", "no option 'margn'"),
    ],
)
def test_a_mark_that_is_wrong_names_the_test(pytester, mark, says):
    result = collect(pytester, mark)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_mine*", f"*{says}*"] if says.startswith("either") else [f"*test_mine*{says}*"])


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("bakend='torchao'", "did you mean 'backend'?"),
        ("'torchao', 'rowwise'", "@pytest.mark.fp8(backend='torchao', recipe='rowwise')"),
        ("backend='torcho'", "did you mean 'torchao'?"),
        ("backend='cuda'", "backend='torchao' or backend='transformer_engine' ('te')*"),
        ("recipe='tensor_wise'", "did you mean 'tensorwise'?"),
        ("recipe='delayed'", "backend='transformer_engine', which has it"),
        ("model='tinny'", "did you mean 'tiny'?"),
        ("model='mine'", "leave model= out, and bring a model of your own*"),
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
        ("batch='4'", "a whole number from 1"),
        ("batch=0", "a whole number from 1"),
        ("lora=True", "a whole number"),
        ("tolerance='2%'", "a number"),
        ("tolerance=float('nan')", "a fraction between 0 and 1"),
        ("questions='layers'", "a tuple of texts"),
        ("options=['margin']", "a dict with names as keys"),
        ("recipe=None", "a text"),
        ("name=3", "a text"),
        ("name=200 * 'x', emulated=True", "at most 200 characters, which name its row and its baseline"),
        ("cases='tiny'", "a list of pytest_fp8.Case"),
        ("cases=1", "a list of pytest_fp8.Case"),
    ],
)
def test_an_argument_of_another_type_is_refused(pytester, mark, expected):
    result = collect(pytester, f"@pytest.mark.fp8({mark})")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_mine*", f"*expected: {expected}", "*seen:*", "*next:*"])


@pytest.mark.parametrize("given", ["recipe=[]", "backend=()", "model=[], emulated=True", "cases=[]", "cases=()"])
@pytest.mark.parametrize("question", ["", ", question='loss'"])
def test_a_mark_with_an_empty_list_is_refused(pytester, given, question):
    result = collect(pytester, f"@pytest.mark.fp8({given}{question})")
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    name = given.partition("=")[0]
    result.stdout.fnmatch_lines(["*test_mine names no case", f"*seen: *{name}=[[]]", f"*next: *take {name}=[[]] out*"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("weights='/nope'", "weights= with a model of your own"),
        ("batch=4", "batch= with a model of your own"),
        ("seq=128", "seq= with a model of your own"),
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


def test_a_user_s_own_empty_list_of_cases_is_skipped_as_pytest_does(pytester):
    result = collect(pytester, "@pytest.mark.parametrize('fp8_case', [], indirect=True)")
    result.assert_outcomes(skipped=1)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lora='8'", "lora=8"),
        ("loss_steps=5.5", "loss_steps=6"),
        ("loss_steps=-5", "loss_steps=1"),
        ("loss_seeds='many'", "loss_seeds=1"),
        ("tolerance='0.03'", "tolerance=0.03"),
        ("compile='no'", "compile=False"),
        ("emulated=1", "emulated=True"),
        ("questions='layers'", "questions=('layers',)"),
    ],
)
def test_the_next_step_is_near_what_was_given(pytester, given, meant):
    collect(pytester, f"@pytest.mark.fp8({given})").stdout.fnmatch_lines([f"*next: *{meant}"])


def test_lists_and_paths_become_what_a_case_keeps(tmp_path):
    case = Case("tiny", "torchao", "rowwise", questions=["layers"], weights=tmp_path)
    assert (case.questions, case.weights) == (("layers",), str(tmp_path))


@pytest.mark.parametrize("short", ["te", "transformer_engine"])
def test_a_backend_goes_by_its_short_name_as_well(short):
    case = Case("1b", short, "delayed")
    assert (case.backend, case.id) == ("transformer_engine", "1b-te-delayed")
    assert case.digest() == Case("1b", "transformer_engine", "delayed").digest()


def ids(pytester, code):
    pytester.makepyfile(f"import pytest\n{code}")
    lines = pytester.runpytest("--collect-only", "-q").outlines
    return [line.split("[")[1].rstrip("]") for line in lines if "::" in line]


def test_lists_multiply_as_parametrize_does(pytester):
    code = "@pytest.mark.fp8(model=['tiny', '1b'])\n@pytest.mark.fp8(recipe=['tensorwise', 'rowwise'])\n"
    found = ids(pytester, code + "def test_mine(fp8_case): pass")
    assert sorted(found) == sorted(f"{m}-torchao-{r}" for m in ("tiny", "1b") for r in ("tensorwise", "rowwise"))


def test_lists_at_different_places_multiply_too(pytester):
    code = "pytestmark = pytest.mark.fp8(model=['tiny', '1b'])\n@pytest.mark.fp8(recipe=['tensorwise', 'rowwise'])\n"
    found = ids(pytester, code + "def test_mine(fp8_case): pass")
    assert sorted(found) == sorted(f"{m}-torchao-{r}" for m in ("tiny", "1b") for r in ("tensorwise", "rowwise"))


def test_two_marks_at_one_place_that_give_one_argument_are_refused(pytester):
    result = collect(pytester, "@pytest.mark.fp8(recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["two marks*test_mine give recipe=", "*next:*recipe=?'tensorwise', 'rowwise'] in one mark*"]
    )


def test_the_mark_of_a_function_wins_over_that_of_its_module(pytester):
    code = "pytestmark = pytest.mark.fp8(model='tiny', recipe='rowwise')\n@pytest.mark.fp8(recipe='tensorwise')\n"
    assert ids(pytester, code + "def test_mine(fp8_case): pass") == ["tiny-torchao-tensorwise"]


def test_a_test_that_names_no_case_says_how(pytester):
    pytester.makepyfile("def test_mine(fp8_pair): pass")
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*expected: @pytest.mark.fp8(*"])


def test_the_marker_is_registered(pytester):
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.fp8(*"])
    assert not [name for name in ARGUMENTS if not re.search(rf"\b{name}\b", result.stdout.str())]


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


def test_a_case_is_known_by_all_that_changes_a_number():
    case = Case("1b", "transformer_engine", "delayed", options={"amax_history_len": 16})
    assert case.id == "1b-te-delayed-amax_history_len.16"
    assert case.digest() != Case("1b", "transformer_engine", "delayed").digest()
    assert (
        case.digest()
        == Case("1b", "transformer_engine", "delayed", options={"amax_history_len": 16}, tolerance=0.1).digest()
    )
    assert Case("1b", "transformer_engine", "delayed", options={"margin": 0}).id == "1b-te-delayed", (
        "a default says nothing"
    )


@pytest.mark.parametrize(
    ("more", "size"), [({"batch": 8}, "8x2048"), ({"seq": 512}, "4x512"), ({"batch": 2, "seq": 8}, "2x8")]
)
def test_another_step_is_another_case_and_says_its_size(more, size):
    usual = Case("1b", "transformer_engine", "delayed")
    other = Case("1b", "transformer_engine", "delayed", **more)
    assert other.id == f"{usual.id}-{size}"
    assert other.digest() != usual.digest()


def test_several_gpus_are_another_case_and_one_gpu_is_the_case_it_was():
    alone, several = Case("1b", "torchao", "tensorwise"), Case("1b", "torchao", "tensorwise", gpus=2, parallel="ddp")
    assert several.id == "1b-torchao-tensorwise-ddp.2"
    assert several.reference().id == "1b-bf16-ddp.2"
    sharded = [replace(several, parallel="fsdp2", options={"float8_all_gather": on}) for on in (False, True)]
    assert sharded[0].id == "1b-torchao-tensorwise-fsdp2.2"
    assert sharded[1].id == "1b-torchao-tensorwise-float8_all_gather.True-fsdp2.2"
    digests = {case.digest() for case in (alone, several, *sharded, replace(several, gpus=4))}
    assert len(digests) == 5
    assert alone.digest() == "6b917883fa056b2b", "as it was before there were several"


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
        {"backend": "transformer_engine", "recipe": "delayed", "options": {"fp8_format": "E5M2"}},
        {"backend": "transformer_engine", "recipe": "delayed", "options": {"amax_history_len": 0}},
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


def test_full_fine_tuning_with_unsloth_is_refused_with_its_message():
    with pytest.raises(SettingsError, match="not compatible with full finetuning"):
        Case("1b", "unsloth", "rowwise")


@pytest.mark.parametrize("more", [{"compile": False}, {"activation_checkpointing": True}])
def test_of_unsloth_neither_compiling_nor_checkpointing_can_be_asked(more):
    with pytest.raises(SettingsError, match="compiles its model itself"):
        Case("1b", "unsloth", "rowwise", lora=16, **more)


def test_emulated_cases_never_answer_for_speed_or_memory():
    case = Case("tiny", "torchao", "rowwise", emulated=True)
    assert not case.asks("speedup")
    assert not case.asks("memory")
    assert case.asks("loss")


# Not importorskip: torch, imported after `pytester` began, would be imported a second time, which it does not survive.
with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
TWICE = "During handling of the above exception, another exception occurred"


def test_a_mark_that_is_wrong_is_shown_once(pytester):
    result = collect(pytester, "@pytest.mark.fp8(bakend='torchao')")
    assert result.stdout.str().count("has no argument 'bakend'") == 1
    result.stdout.no_fnmatch_line(f"*{TWICE}*")


@with_torchao
def test_a_pair_that_cannot_be_had_is_one_error(pytester):
    """The workload's function holds a lock, which no other process can be given."""
    pytester.makepyfile(
        """
        import threading
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            lock = threading.Lock()
            return Workload(build=lambda: lock, batch=lambda step: lock)

        @pytest.mark.fp8(emulated=True)
        def test_mine(fp8_pair): pass
        """
    )
    result = pytester.runpytest("-rN")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*cannot be sent to the arm's process*", "*expected:*"])
    result.stdout.no_fnmatch_line(f"*{TWICE}*")
    result.stdout.no_fnmatch_line("*direct cause*")


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "bf16_model", "fp8_model"])
def test_a_workload_fixture_that_gives_something_else_is_named(pytester, fixture):
    pytester.makepyfile(
        f"""
        import pytest

        class Net: pass

        @pytest.fixture
        def fp8_workload():
            return Net

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "the fixture fp8_workload did not give a workload",
            "*expected: pytest_fp8.Workload(build=..., batch=...), or None*",
            "*seen: *a class: <class '*.Net'>, from test_a_workload_*.py:5",
            "*cause: *",
            "*next: *return Workload(build=*",
        ]
    )


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "bf16_model", "fp8_model"])
def test_a_workload_fixture_without_a_return_is_named(pytester, fixture):
    pytester.makeconftest(
        """
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            Workload(build=lambda: None, batch=lambda step: None)
        """
    )
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "test_mine*: the fixture fp8_workload gave None*",
            "*seen: *None, from conftest.py:4",
            "*next: *return Workload(*",
        ]
    )


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "fp8_model"])
def test_a_mark_without_a_model_and_no_fixture_says_that_none_overrides(pytester, fixture):
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_mine*: no model to train", "*cause: *no fixture fp8_workload here overrides*"])


def test_a_test_without_a_mark_does_not_begin_with_an_empty_name(pytester):
    pytester.makepyfile("def test_mine(fp8_pair): pass")
    result = pytester.runpytest()
    result.stdout.fnmatch_lines(["*ERROR at setup of test_mine*", "this test asks for an FP8 case and names none"])
    result.stdout.fnmatch_lines(["*seen:*", "*cause:*", "*next:*"])


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


NAMES = ("größe", "grüße", "a b", "a_b", "a/b", "a__b", "vit", "vit.2", "v-1", "")


def test_names_that_differ_give_ids_that_differ(tmp_path):
    found = {name: Case("own", "torchao", "rowwise", name=name).id for name in NAMES}
    assert len(set(found.values())) == len(NAMES)
    for name, case in found.items():
        assert baseline_path(tmp_path, "h200", case).stem == case, "it names a baseline"
        assert case.startswith("own.gr__e.") == (name in ("größe", "grüße"))


@pytest.mark.parametrize("name", ["a_b", "vit", "vit.2", "v-1"])
def test_a_name_of_plain_signs_stands_in_the_id_as_it_is(name):
    assert Case("own", "torchao", "rowwise", name=name, emulated=True).id == f"own.{name}-torchao-rowwise-emulated"


def test_of_one_model_every_case_has_the_same_name_in_its_id():
    recipes = ("rowwise", "tensorwise")
    cases = [Case("own", "torchao", recipe, name="größe", lora=8, lora_targets=("q proj",)) for recipe in recipes]
    begins, ends = {case.id.partition("-")[0] for case in cases}, {case.id.rpartition("-")[2] for case in cases}
    assert (len(begins), len(ends)) == (1, 1)
    assert re.fullmatch(r"own\.gr__e\.[0-9a-f]{6}", begins.pop())
    assert re.fullmatch(r"lora8\.q_proj\.[0-9a-f]{6}", ends.pop())


def test_one_of_two_such_models_is_chosen_by_its_id(pytester):
    marks = "@pytest.mark.fp8(name='größe')\ndef test_a(fp8_case): pass\n@pytest.mark.fp8(name='grüße')\n"
    found = ids(pytester, f"{marks}def test_b(fp8_case): pass")
    assert len(set(found)) == 2
    chosen = [line for line in pytester.runpytest("--collect-only", "-q", "-k", found[0]).outlines if "::" in line]
    assert [line.split("[")[1] for line in chosen] == [f"{found[0]}]"]
