"""A case: what it keeps, its id and its digest, and cases that cannot be."""

from dataclasses import replace

import pytest

from pytest_fp8 import Case, SettingsError
from pytest_fp8.baselines.store import baseline_path


def test_a_list_becomes_the_tuple_that_a_case_keeps():
    assert Case("tiny", "torchao", "rowwise", questions=["layers"]).questions == ("layers",)


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
    """1 is equal to True, and stands in an id as another word."""
    for option, value in (("float8_all_gather", 1), ("float8_all_gather", "True"), ("precompute_scale", 1.0)):
        with pytest.raises(SettingsError, match=option):
            Case("tiny", "torchao", "tensorwise", options={option: value}, gpus=2, parallel="fsdp2")
    for option in ("amax_history_len", "margin"):
        with pytest.raises(SettingsError, match=option):
            Case("1b", "te", "delayed", options={option: True})
