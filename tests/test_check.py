"""``fp8_check``: a test of each question that a case answers, known from collection on."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, install

SUITE = """
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("tiny", "torchao", "rowwise"), Case("micro", "torchao", "rowwise", emulated=True)]

    @pytest.mark.fp8(cases=CASES)
    def test_fp8(fp8_check):
        {asks}
"""
ON_A_GPU = ["layers", "numerics", "loss", "faster", "speedup", "memory", "checkpoints"]
EMULATED = ["layers", "numerics", "loss", "checkpoints"]


@pytest.fixture
def suite(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=1.2)
    pytester.makepyfile(SUITE.format(asks="fp8_check()"))
    return pytester


def test_each_question_that_a_case_answers_is_a_test(suite):
    collected = [line for line in suite.runpytest("--co", "-q").outlines if "::" in line]
    names = [line.partition("[")[2].removesuffix("]") for line in collected]
    expected = [f"tiny-torchao-rowwise-{each}" for each in ON_A_GPU]
    expected += [f"micro-torchao-rowwise-emulated-{each}" for each in EMULATED]
    assert sorted(names) == sorted(expected)


def test_one_question_is_chosen_by_its_name(suite):
    result = suite.runpytest("--fp8-gpu=h200", "-k", "loss", "-v")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*::test_fp8?tiny-torchao-rowwise-loss? PASSED*"])


def test_all_of_them_are_asked(suite):
    result = suite.runpytest("--fp8-gpu=h200")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise *yes*"])


def test_a_test_that_does_not_call_it_asks_nothing(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(SUITE.format(asks="fp8_check"))
    pytester.runpytest("-k", "tiny and layers", "-W", "always").stdout.fnmatch_lines(["*asks nothing of it*"])
