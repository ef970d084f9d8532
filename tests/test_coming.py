"""What a session builds ahead while a case answers, and for which case processes start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, install
from pytest_fp8 import Case
from pytest_fp8.markers import running
from pytest_fp8.options import Settings
from pytest_fp8.session_plan import Coming, coming


def recipes(cases):
    return [case.recipe for case in cases if case.backend != "bf16"]


FIRST = Case("1b", "torchao", "tensorwise", checkpoint_formats=("safetensors", "dcp"), tolerance=0.03)
OTHERS = [Case("1b", "torchao", recipe, floor=0.9) for recipe in ("rowwise", "rowwise_with_gw_hp")]
CASES = [FIRST, Case("8b", "transformer_engine", "current"), *OTHERS]


def test_what_comes_is_built_ahead_and_processes_start_for_the_next_case():
    soon = coming(CASES, FIRST)
    assert recipes(soon.alike) == ["rowwise", "rowwise_with_gw_hp"]
    assert recipes(soon.others) == ["current", "rowwise", "rowwise_with_gw_hp"]
    assert soon.then == [CASES[1].reference(), CASES[1]]
    assert coming(CASES, OTHERS[-1]) == Coming([], [], [], [])


def test_a_worker_builds_nothing_ahead_and_starts_what_comes_of_its_model():
    soon = coming(CASES, FIRST, is_worker=True)
    assert (soon.alike, soon.rehearsed, soon.others) == ((), (), ())
    assert recipes(soon.then) == ["rowwise"]
    assert recipes(coming(CASES[:2], FIRST, is_worker=True).then) == ["current"], "it may be given another model"


@pytest.mark.parametrize("apart", [{"gpus": 2, "parallel": "ddp", "batch": 8}, {"model": "own"}])
def test_nothing_is_planned_beyond_or_beside_cases_whose_memory_nobody_knows(apart):
    other = replace(OTHERS[0], **apart)
    assert recipes(coming([FIRST, other, OTHERS[1]], FIRST).others) == []
    assert recipes(coming([other, FIRST], other).others) == []


def test_large_models_are_rehearsed_where_the_gpu_holds_them():
    tiny = [Case("tiny", "torchao", recipe) for recipe in ("tensorwise", "rowwise")]
    later = [Case("1b", "torchao", "tensorwise"), Case("8b", "transformer_engine", "current", batch=2)]
    mine = Case("8b", "torchao", "rowwise", weights="a folder")
    soon = coming([*tiny, *later, mine], tiny[0])
    assert [case.id for case in soon.rehearsed] == ["8b1-bf16-2x4096", "8b1-te-current-2x4096"]
    assert (soon.rehearsed[1].batch, soon.rehearsed[1].seq) == (2, None), "the compilers see the same sizes"
    assert [case.id for case in soon.alike] == ["tiny-bf16", "tiny-torchao-rowwise"]
    assert coming([*tiny, *later], tiny[0], memory=H100.memory).rehearsed == [], "that GPU does not hold it"


def test_no_process_starts_for_a_case_that_does_not_run_here(monkeypatch):
    install(monkeypatch, H200)
    here, eight = Case("1b", "torchao", "rowwise"), Case("8b", "torchao", "rowwise", gpus=8, batch=8, parallel="fsdp2")
    emulated = Case("tiny", "torchao", "rowwise", emulated=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert running([here, eight, emulated], Settings(gpu="h200")) == [here]
    assert coming(running([here, eight], Settings(gpu="h200")), here) == Coming([], [], [], [])
