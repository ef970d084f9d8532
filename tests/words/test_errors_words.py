"""Every sentence of the errors that a person sees before, beside and inside an arm, made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200
from pytest_fp8 import Case, Workload, doctor, gpu
from pytest_fp8.codes import R, S
from pytest_fp8.errors import Fp8Error
from pytest_fp8.markers import cases_of
from pytest_fp8.options import Settings
from pytest_fp8.report.rows import Answer
from pytest_fp8.report.terminal import unanswered

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def mark(*args, **fields):
    return lambda: cases_of("test_x.py::test", [(None, pytest.mark.fp8(*args, **fields).mark)], Settings())


def two_marks():
    marks = [(None, pytest.mark.fp8(recipe=recipe).mark) for recipe in ("tensorwise", "rowwise")]
    return cases_of("test_x.py::test", marks, Settings())


def case(**fields):
    return lambda: Case(**{"model": "tiny", "backend": "torchao", "recipe": "tensorwise", **fields})


def workload(**fields):
    return lambda: Workload(**{"build": lambda: None, "batch": lambda step: None, **fields})


def half(**fields):
    return lambda: workload(**fields)().ship("test_x.py::test")


SETTINGS = {
    "unknown GPU": (R.UNKNOWN_GPU, lambda: gpu.known("x100")),
    "unknown model": (R.UNKNOWN_NAME, case(model="tinny")),
    "unknown backend": (R.UNKNOWN_NAME, case(backend="torchoa")),
    "unknown recipe": (R.UNKNOWN_NAME, case(recipe="delayed")),
    "unknown option": (R.UNKNOWN_NAME, case(options={"margin": 1})),
    "unknown chip": (R.UNKNOWN_NAME, case(chip="ampere")),
    "unknown question": (R.UNKNOWN_NAME, case(questions=("speed",))),
    "unknown argument": (R.BAD_MARK, mark(recipy="tensorwise")),
    "type of a field": (R.BAD_VALUE, case(steps="40")),
    "tolerance": (R.BAD_VALUE, case(tolerance=2.0)),
    "floor": (R.BAD_VALUE, case(floor=0.0)),
    "stores": (R.BAD_VALUE, case(checkpoint_formats=("pickle",))),
    "a text as leave": (R.BAD_VALUE, workload(leave="*.router")),
    "positional": (R.BAD_MARK, mark("torchao")),
    "both": (R.BAD_MARK, mark(cases=[], recipe="tensorwise")),
    "no list": (R.BAD_MARK, mark(cases=7)),
    "two marks": (R.BAD_MARK, two_marks),
    "no case": (R.NO_CASE, mark(recipe=[])),
    "no case that answers": (R.NO_CASE, mark(emulated=True, question="memory")),
    "emulated": (R.NOT_EMULATED, case(backend="te", recipe="delayed", emulated=True)),
    "ranks": (R.FIELDS_DISAGREE, case(gpus=2)),
    "zero3": (R.FIELDS_DISAGREE, case(gpus=2, parallel="zero3")),
    "gathers": (R.FIELDS_DISAGREE, case(options={"float8_all_gather": True})),
    "autocast": (R.FIELDS_DISAGREE, case(backend="unsloth", recipe="rowwise", lora=8, autocast=True)),
    "own size": (R.FIELDS_DISAGREE, case(model="own", batch=4)),
    "adapters alone": (R.ADAPTERS_ALONE, case(backend="unsloth", recipe="rowwise")),
    "a model": (R.NOT_A_FUNCTION, workload(build=torch.nn.Linear(2, 2))),
    "arguments": (R.NOT_A_FUNCTION, workload(batch=lambda: None)),
    "save alone": (R.SAVE_WITHOUT_LOAD, half(save=lambda model, optimizer, folder: None)),
}


def said_by(make):
    with pytest.raises(Fp8Error) as raised:
        make()
    return raised.value


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_said_of_settings(snapshot, name):
    code, make = SETTINGS[name]
    error = said_by(make)
    assert error.code is code
    assert re.sub(r" at 0x\w+", "", error.message) == snapshot


def test_each_sentence_is_raised_by_its_name():
    from pytest_fp8.said import said

    code = "".join(path.read_text() for path in (ROOT / "pytest_fp8").rglob("*.py"))
    raised = set(re.findall(r'WorkloadError\(\s*"(\w+)"', code))
    assert raised | {"rows"} == set(said()["workload"])
    assert set(re.findall(r"class (\w+)\(Told, ", code)) == set(said()["error"])
    assert all(R[entry["code"]] for table in ("workload", "error") for entry in said()[table].values())


def test_what_the_doctor_finds(snapshot, monkeypatch):
    monkeypatch.setattr("pytest_fp8.doctor.library_versions", lambda packages: {"torch": "1.0"})
    found = [*doctor.library_lines(), doctor.gpu_line(replace(H200, capability=(8, 0)), "")]
    found += [doctor.judged("torchao", "tensorwise", {"off": off}) for off in (0.002, 0.5)]
    assert [(each.code, each.topic) for each in found if each.code] == snapshot


def test_what_a_session_says_at_its_end(snapshot):
    answers = [Answer("", "a", "", "loss", "INVALID", "FP8-D01", "the arms trained on different data")]
    answers += [Answer("", "b", "", "speedup", "NOT_EXERCISED", S.NO_BASELINE, "no baseline")]
    problems, _ = unanswered(answers, gpu="h200", in_ci=True)
    assert problems == snapshot
