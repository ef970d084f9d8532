"""Runs of a part: cut short, of chosen tests alone, or shared by workers of pytest-xdist."""

from __future__ import annotations

import re

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.sessions import FILE, update
from helpers.told import Told
from pytest_fp8.verdicts import passed


@pytest.mark.parametrize("arguments", [("-k", "layers"), ("test_orphan.py",), ("--maxfail=1",)])
def test_a_run_of_a_part_names_no_orphans(stored, monkeypatch, arguments):
    (stored.path / "baselines/h200/tiny-torchao-gone.json").write_text((stored.path / FILE).read_text())
    stored.makepyfile(test_orphan=SUITE)
    install(monkeypatch, H200, nan_at=3)
    result = stored.runpytest("--fp8-gpu=h200", *arguments)
    result.stdout.no_fnmatch_line("*orphaned*")


def test_one_partial_worker_makes_the_run_partial():
    told = Told()
    assert told.partial, "a suite's controls alone, which are of no case"
    told.collected({"a1": "a"})
    told.ended("a1", "a")
    assert not told.partial
    told.collected({"a1": "a"}, partial=True)
    assert told.partial


def test_rows_stand_in_the_order_of_their_tests_whichever_worker_ends_first():
    for order in ("ab", "ba"):
        told = Told()
        told.collected({"test_b": "b", "test_a": "a"})
        for case in order:
            told.notes.begin(f"test_{case}")
            told.answer(case, passed("fine").answer("layers"))
        assert list(told.entries) == ["b", "a"]


CUT_SHORT = """
    @pytest.fixture(autouse=True)
    def cut_short(request):
        if request.node.name == "test_loss[tiny-te-current]":
            {how}
"""


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize(
    "how", ["raise KeyboardInterrupt", "pytest.fail('first of all')", "pytest.exit('enough', returncode=3)"]
)
@pytest.mark.parametrize("marked", [True, False], ids=["questions", "no questions"])
def test_a_case_that_an_interrupted_run_half_asked_is_not_stored(pytester, monkeypatch, capfd, how, marked):
    install(monkeypatch, H200)
    tests = SUITE if marked else re.sub(', question="[a-z]+"', "", SUITE)
    assert ("question" in tests) is marked
    pytester.makepyfile(tests + CUT_SHORT.format(how=how))
    pytester.inline_run(*update(), "-x", no_reraise_ctrlc=True)
    assert [path.stem for path in (pytester.path / "baselines/h200").glob("*.json")] == ["tiny-torchao-rowwise"]
    if "exit" not in how:
        # pytest itself writes no summary after pytest.exit with a status of its own.
        assert "tiny-te-current was not updated: the run was cut short" in capfd.readouterr().out


def test_open_are_the_tests_that_no_worker_ran():
    told = Told()
    for _ in range(3):
        told.collected({"a1": "a", "a2": "a", "b1": "b"})
    told.ended("a1", "a")
    told.ended("b1", "b", "skipped", "not today", ran=False)
    assert told.open_tests == {"a": ["a2"]}


def test_skipped_tests_and_failures_elsewhere_do_not_cut_a_case_short(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        SUITE
        + """
    @pytest.mark.skip(reason="not today")
    @pytest.mark.fp8(cases=CASES, question="checkpoints")
    def test_checkpoints(fp8_pair): ...

    def test_something_else():
        assert False

    def test_never_reached(): ...
    """
    )
    pytester.runpytest(*update(), "-x")
    assert len(list((pytester.path / "baselines/h200").glob("*.json"))) == 2
