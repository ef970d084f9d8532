"""report.json: a schema number, and what pictures show; read strictly, refused in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.mutants import mutants
from pytest_fp8.baselines.strict import parse
from pytest_fp8.errors import Fp8Error
from pytest_fp8.plain import finite
from pytest_fp8.report.reading import read_report

COUNT = 200


@pytest.fixture
def folder(pytester, monkeypatch):
    install(monkeypatch, H200, busy=90.0)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    return pytester.path / "out"


def test_a_report_has_what_pictures_show(folder):
    report = read_report(folder)
    assert report["schema"] == 1
    shown = [entry["evidence"] for entry in report["entries"].values()]
    curves = [curve for each in shown for curve in each.get("curves", ())]
    layers = [layer for each in shown for layer in each.get("layers", ())]
    assert curves
    assert all(len(curve["bf16"]) == len(curve["fp8"]) for curve in curves)
    assert {kind for layer in layers for kind in layer["ran"].values()} >= {"fp8"}


def test_numbers_that_are_not_finite_are_null():
    assert finite({"a": [math.nan, 1.0, (math.inf,)], "b": "nan"}) == {"a": [None, 1.0, [None]], "b": "nan"}


def test_a_mutated_report_is_read_or_refused_in_one_line(folder, tmp_path):
    mutant, refused = tmp_path / "report.json", []
    for _, data in mutants((folder / "report.json").read_text(), COUNT, seed=1):
        mutant.write_bytes(data)
        refused += refusal_of(mutant)
    assert len(refused) > COUNT / 4
    assert all(headline.isprintable() and len(headline) <= 500 for headline in refused)


def refusal_of(path):
    try:
        read_report(path)
    except Fp8Error as error:
        return [error.headline]
    return []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": true}', '{"entries": {}}', '{"schema": NaN}', "\x00"])
def test_what_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(Fp8Error, match="is no report of this pytest-fp8"):
        read_report(tmp_path)


def test_the_schema_is_in_the_docs():
    root = Path(__file__).parents[1]
    shown = root / "docs" / "report.schema.json"
    assert json.loads(shown.read_text()) == json.loads((root / "pytest_fp8/report/report.schema.json").read_text())
    parse(shown.read_text())  # refuses a key that stands there twice


@pytest.mark.parametrize("options", [(), ("--fp8-update=new",)], ids=["gate", "update"])
def test_a_loss_that_is_not_finite_is_stored_nowhere_and_ends_no_run(pytester, monkeypatch, options):
    pytester.makepyfile(SUITE)
    install(monkeypatch, H200, nan_at=3)
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    why = "the loss question failed (the FP8 arm's loss is not finite from step 3 on)"
    if options:
        result.stdout.fnmatch_lines([f"*baseline of tiny-torchao-rowwise was not updated: {why}"])
    assert not list(pytester.path.glob("baselines/h200/*.json"))
