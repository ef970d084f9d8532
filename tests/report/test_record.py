"""The record of a session: rows, worst answers and what is open are folds over what tests told, in any order."""

from __future__ import annotations

import itertools
import json

import pytest

from helpers.records import ORIGIN, Told
from pytest_fp8.codes import C, R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.files import read_report
from pytest_fp8.report.record import JOURNAL, SCHEMA, Began, Record
from pytest_fp8.verdicts import Decision, Verdict, passed


def decision(verdict: Verdict) -> Decision:
    return Decision(None if verdict is Verdict.PASS else C.MORE_SEEDS, verdict, verdict.value.lower(), question="loss")


@pytest.mark.parametrize("order", ["aabc", "cbaa", "abca"])
def test_each_model_of_a_case_has_one_row(order):
    told = Told()
    for model in order:
        told.answer("own", passed(f"of {model}").answer("layers"), model=model, fp8_layers=[ord(model)])
    assert list(told.entries) == ["own", "own #2", "own #3"]
    assert {row.namesakes for row in told.entries.values()} == {3}
    for row in told.entries.values():
        model = row.decisions["layers"].headline[-1]
        assert row.metrics["fp8_layers"]["values"] == [ord(model)]
    told.answer("own.other", passed("").answer("layers"))
    assert told.entries["own.other"].namesakes == 0


def test_an_error_before_the_arms_were_there_is_in_the_row_of_its_model():
    told = Told()
    told.error("own", Fp8Error(R.ARM_DIED, "no arm"))
    told.case("own", case_hash="aa", gpu="h200")
    [row] = told.entries.values()
    assert (row.case_hash, row.gpu, [each.said for each in row.errors]) == ("aa", "h200", [f"ERROR {R.ARM_DIED}"])


@pytest.mark.parametrize("order", list(itertools.permutations(("PASS", "NOT_EXERCISED", "INVALID"))))
def test_of_several_asserted_answers_the_worst_is_kept(order):
    told = Told()
    for verdict in order:
        told.answer("case", decision(Verdict(verdict)), asserted=True)
    assert [answer.verdict for answer in told.asserted()] == ["INVALID"]


@pytest.mark.parametrize("order", list(itertools.permutations((Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS))))
def test_a_missing_answer_is_kept_beside_the_fail_of_another_test(order):
    told = Told()
    for verdict in order:
        told.answer("case", decision(verdict), asserted=True)
    assert told.entries["case"].decisions["loss"].verdict == "FAIL"
    assert [answer.verdict for answer in told.asserted()] == ["INCONCLUSIVE"]


@pytest.mark.parametrize("order", [("look", "assert"), ("assert", "look")])
def test_what_a_test_only_looked_at_takes_no_place_of_what_was_asserted(order):
    told = Told()
    for step in order:
        told.answer("case", decision(Verdict.FAIL if step == "look" else Verdict.PASS), asserted=step == "assert")
    assert told.entries["case"].decisions["loss"].verdict == "PASS"


def test_a_test_that_passes_when_it_is_run_again_is_none_that_failed():
    told = Told()
    told.ended("t", "tiny", "failed")
    assert told.failed_tests == ["t"]
    told.ended("t", "tiny")
    assert (told.failed_tests, told.ran) == ([], 1)


def test_seconds_of_workers_are_added():
    told = Told()
    spent = {"elapsed": 100.0, "waited": {"8b": {"build": 30.0}}}
    told.add([{"kind": "Seconds", **spent}] * 2)
    assert told.durations == {"elapsed": 200.0, "waited": {"8b": {"build": 60.0}}}


def test_a_journal_holds_all_but_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / JOURNAL
    record = Record(path, lambda: Began(SCHEMA, ORIGIN))
    told = Told()
    told.collected({"t": "case", "u": "case"})
    record.add(told.to_lines())
    assert path.exists(), "also of a run that is killed before its first answer"
    told.answer("case", decision(Verdict.FAIL), asserted=True)
    told.ended("t", "case")
    for line in told.to_lines()[1:]:
        record.add([line])
    read = read_report(tmp_path)
    assert read.entries == record.entries
    assert (read.partial, read.finished, read.provenance) == (True, False, ORIGIN)
    record.finish(True, ["nothing timed"])
    assert read_report(tmp_path).beside[1:] == ["nothing timed"]
    with path.open("a") as file:
        file.write(json.dumps(told.to_lines()[-1])[:40])
    assert read_report(tmp_path).open_tests == {"case": ["u"]}


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


def test_open_are_the_tests_that_no_worker_ran():
    told = Told()
    for _ in range(3):
        told.collected({"a1": "a", "a2": "a", "b1": "b"})
    told.ended("a1", "a")
    told.ended("b1", "b", "skipped", "not today", ran=False)
    assert told.open_tests == {"a": ["a2"]}
