"""A case: what it keeps, its id and its digest, and cases that cannot be."""

import re
from dataclasses import replace

import pytest

from pytest_fp8 import Case, SettingsError
from pytest_fp8.baselines.store import baseline_path


def test_one_name_is_no_two_folders_of_weights(pytester):
    for folder in ("a", "b"):
        (pytester.mkdir(folder) / "config.json").write_text("{}")
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", weights=f) for f in ("a", "b")])
        def test_it(fp8_pair):
            pass
        """
    )
    for more in ((), ("--collect-only",)):
        result = pytester.runpytest(*more)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(
            ["ERROR: FP8-R26: two cases are named tiny-torchao-rowwise*", "*weights='a' and*'b'"]
        )


def test_lists_and_paths_become_what_a_case_keeps(tmp_path):
    case = Case("tiny", "torchao", "rowwise", questions=["layers"], weights=tmp_path)
    assert (case.questions, case.weights) == (("layers",), str(tmp_path))


@pytest.mark.parametrize("short", ["te", "transformer_engine"])
def test_a_backend_goes_by_its_short_name_as_well(short):
    case = Case("1b", short, "delayed")
    assert (case.backend, case.id) == ("transformer_engine", "1b-te-delayed")
    assert case.digest() == Case("1b", "transformer_engine", "delayed").digest()


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


def test_of_one_model_every_case_has_the_same_name_in_its_id():
    recipes = ("rowwise", "tensorwise")
    cases = [Case("own", "torchao", recipe, name="größe", lora=8, lora_targets=("q proj",)) for recipe in recipes]
    begins, ends = {case.id.partition("-")[0] for case in cases}, {case.id.rpartition("-")[2] for case in cases}
    assert (len(begins), len(ends)) == (1, 1)
    assert re.fullmatch(r"own\.gr__e\.[0-9a-f]{6}", begins.pop())
    assert re.fullmatch(r"lora8\.q_proj\.[0-9a-f]{6}", ends.pop())


def test_one_case_has_one_id():
    """1 is equal to True, and stands in an id as another word."""
    for option, value in (("float8_all_gather", 1), ("float8_all_gather", "True"), ("precompute_scale", 1.0)):
        with pytest.raises(SettingsError, match=option):
            Case("tiny", "torchao", "tensorwise", options={option: value}, gpus=2, parallel="fsdp2")
    for option in ("amax_history_len", "margin"):
        with pytest.raises(SettingsError, match=option):
            Case("1b", "te", "delayed", options={option: True})


def test_cases_are_keys():
    one, same, other = (Case("1b", "te", "delayed", options={"margin": margin}) for margin in (1, 1, 2))
    assert {one: 1, same: 2, other: 3} == {one: 2, other: 3}


def test_the_chip_is_no_part_of_what_is_trained():
    anywhere, hopper = Case("1b", "te", "delayed"), Case("1b", "te", "delayed", chip="hopper")
    assert (anywhere.id, anywhere.digest()) == (hopper.id, hopper.digest())
