"""The rule of unanswered questions on a declared GPU."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, SUITE, install
from pytest_fp8.codes import S
from pytest_fp8.report.record import Answer
from pytest_fp8.report.undecided import passed_without, unanswered


def judged(*verdicts, fails=True, in_ci=False, missing=0):
    answers = [Answer("", f"case{i}", "", "loss", verdict, headline="why") for i, verdict in enumerate(verdicts)]
    answers += [Answer("", f"new{i}", "", "speedup", "NOT_EXERCISED", S.NO_BASELINE, "none") for i in range(missing)]
    return unanswered(answers, gpu="h200", fails=fails, in_ci=in_ci, first_steps="STEPS")


def test_answers_alone_say_nothing():
    found = judged("PASS", "FAIL", "IMPROVED")
    assert (found.problems, found.notes) == ([], [])


@pytest.mark.parametrize("verdict", ["INVALID", "NOT_EXERCISED"])
def test_one_question_that_was_not_answered_fails_and_is_listed(verdict):
    (problem,) = judged("PASS", verdict).problems
    assert f"case1 loss: {verdict}: why" in problem
    assert "1 of 2 questions" in problem
    assert "next:" in problem


@pytest.mark.parametrize(("asked", "allowed"), [(2, 1), (39, 1), (40, 2), (100, 5)])
def test_some_may_be_inconclusive_and_no_more(asked, allowed):
    for undecided in (allowed, allowed + 1):
        found = judged(*["INCONCLUSIVE"] * undecided, *["PASS"] * (asked - undecided))
        assert bool(found.problems) is (undecided > allowed)
    assert f"{allowed + 1} INCONCLUSIVE where {allowed} may be" in found.problems[0]


def test_a_missing_baseline_fails_in_ci_alone_and_is_one_line():
    assert judged("PASS", missing=3).problems == []
    (note,) = judged("PASS", missing=3).notes
    assert note.count("\n") == 0
    assert "3 case(s)" in note
    assert "STEPS" in note
    assert judged("PASS", missing=3, in_ci=True).problems == [note]


def test_under_strict_where_the_tests_fail_the_session_shows_the_same():
    failing, warned = judged("INVALID", missing=1, in_ci=True), judged("INVALID", missing=1, in_ci=True, fails=False)
    assert warned.problems == []
    assert sorted(warned.notes) == sorted(failing.problems)


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["PASS", "FAIL", "IMPROVED"], []),
        (["PASS", "INVALID", "NOT_EXERCISED", "INCONCLUSIVE"], ["3 of 4 questions have no answer"]),
    ],
)
def test_without_a_declared_gpu_a_note_says_how_many_tests_pass_without_an_answer(verdicts, said):
    notes = passed_without([Answer("", "case", "", "loss", verdict, headline="why") for verdict in verdicts])
    assert len(notes) == len(said)
    assert all(start in note and "--fp8-strict" in note for start, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(("options", "noted"), [([], True), (["--fp8-strict"], False), (["--fp8-gpu=h200"], False)])
def test_the_note_is_the_last_word_of_such_a_session_alone(pytester, monkeypatch, options, noted):
    install(monkeypatch, H200, strangers=(4242,))
    pytester.makepyfile(SUITE)
    result = pytester.runpytest(*options, "-k", "test_faster and rowwise")
    assert ("no test fails for that; --fp8-strict" in result.stdout.str()) is noted
