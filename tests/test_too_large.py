"""An arm that the GPU cannot hold, with no other one beside it."""

from __future__ import annotations

import pytest

from helpers.fakes import H100, FakeProcess, install
from helpers.residence import noted, run
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


def test_an_arm_that_ran_out_of_memory_alone_fails_its_tests_and_is_not_tried_again(pytester, monkeypatch, told):
    world = install(monkeypatch, H100)
    tried = []
    world.fails = {f"8b-te-{recipe}": R.OUT_OF_MEMORY for recipe in ("delayed", "current")}
    begin = FakeProcess.start_build
    monkeypatch.setattr(FakeProcess, "start_build", lambda self, s: (tried.append(s.case.id), begin(self, s))[1])
    pytester.makepyfile(TE)
    result = pytester.runpytest("--fp8-gpu=h100")
    result.assert_outcomes(failed=8)
    result.stdout.fnmatch_lines(
        ["*FP8-R03: 8b-te-delayed does not fit this GPU*", "*expected:*within the 79.2 GiB of NVIDIA H100*"]
    )
    assert tried.count("8b-te-delayed") == 3, "with its reference, after it, and alone"
    assert tried.count("8b-te-current") == 1


def test_a_reference_that_ran_out_of_memory_alone_is_said_to_be_too_large(pytester, monkeypatch):
    world = install(monkeypatch, H100)
    world.fails["8b-bf16"] = R.OUT_OF_MEMORY
    result = run(pytester, "-k", "layers")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*FP8-R03: 8b-bf16 does not fit this GPU*"])
