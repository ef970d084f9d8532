"""An arm that the GPU cannot hold, by the estimate or in fact."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H100, FakeProcess, install
from helpers.residence import ARMS, noted, run
from pytest_fp8.codes import R

TE = """
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("8b", "transformer_engine", recipe) for recipe in ("delayed", "current")]

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_speedup(fp8_pair):
        fp8_pair.assert_speedup()

    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()

    @pytest.mark.fp8(cases=CASES, question="memory")
    def test_memory(fp8_pair):
        fp8_pair.assert_memory()
"""


@pytest.fixture
def told(monkeypatch):
    return noted(monkeypatch)


def test_an_arm_that_no_gpu_of_this_size_holds_is_not_exercised(pytester, monkeypatch, told):
    world = install(monkeypatch, H100)
    tried = []
    world.fails = {f"8b-te-{recipe}": R.OUT_OF_MEMORY for recipe in ("delayed", "current")}
    begin = FakeProcess.start_build
    monkeypatch.setattr(FakeProcess, "start_build", lambda self, s: (tried.append(s.case.id), begin(self, s))[1])
    pytester.makepyfile(TE)
    result = pytester.runpytest("--fp8-gpu=h100", "--fp8-report=out")
    result.stdout.fnmatch_lines(
        ["*8b-te-delayed does not fit this GPU: about 12 GiB are missing*", "*8 not exercised*"]
    )
    assert result.ret == 1, "on a declared GPU an unanswered question is named"
    assert tried == ["8b-te-delayed", "8b-te-current"], "tried once, and the reference not at all"
    entry = json.loads((pytester.path / "out/report.json").read_text())["entries"]["8b-te-delayed"]
    assert entry["decisions"]["memory"]["verdict"] == "NOT_EXERCISED"
    assert not entry["errors"]


def test_an_arm_that_should_fit_and_does_not_fails(pytester, monkeypatch):
    world = install(monkeypatch, H100)
    world.fails[ARMS[0]] = R.OUT_OF_MEMORY
    result = run(pytester, "-k", "layers")
    result.assert_outcomes(failed=1)


def test_where_the_estimate_is_too_high_an_arm_is_asked_all_the_same(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    pytester.makepyfile(TE)
    result = pytester.runpytest("--fp8-gpu=h100")
    assert result.ret == 0
    assert "does not fit" not in result.stdout.str()
