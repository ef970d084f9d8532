"""Workers' answers in one table: rows of one case that are other models stay apart, whoever numbered them."""

from __future__ import annotations

import itertools

import pytest

from pytest_fp8.report.ledger import Ledger
from pytest_fp8.verdicts import Decision, Verdict


def worker(*models):
    """A ledger with these models of one case: (identity, hash of the case)."""
    ledger = Ledger()
    for identity, case_hash in models:
        row = ledger.row("own", identity)
        if case_hash:
            ledger.begin(row, case_hash, "emulated")
            ledger.note(row, "layers", Decision(None, Verdict.PASS, f"layers of {case_hash}", question="layers"))
            ledger.asserted(row, "layers")
            ledger.measure(row, "fp8_layers", [len(case_hash)])
        else:
            ledger.entries[row].errors.append(f"error of {identity}")
    return ledger.to_json()


def merged(*workers):
    ledger = Ledger()
    for each in workers:
        ledger.merge(each)
    return ledger


def test_two_models_of_two_workers_are_two_rows():
    ledger = merged(worker(("a", "aa")), worker(("b", "bbb")))
    assert {name: entry.case_hash for name, entry in ledger.entries.items()} == {"own": "aa", "own #2": "bbb"}
    for entry in ledger.entries.values():
        assert entry.namesakes == 2
        assert entry.decisions["layers"]["headline"] == f"layers of {entry.case_hash}"
        assert entry.metrics["fp8_layers"]["values"] == [len(entry.case_hash)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_model_has_one_row_in_whatever_order_workers_met_it(order):
    workers = [worker(("a", "aa"), ("b", "bbb")), worker(("b", "bbb"), ("a", "aa")), worker(("c", "c"), ("b", "bbb"))]
    ledger = merged(*(workers[index] for index in order))
    assert sorted(entry.case_hash for entry in ledger.entries.values()) == ["aa", "bbb", "c"]
    assert sorted(ledger.entries) == ["own", "own #2", "own #3"]
    assert {entry.namesakes for entry in ledger.entries.values()} == {3}
    for entry in ledger.entries.values():
        assert entry.decisions["layers"]["headline"] == f"layers of {entry.case_hash}"


def test_one_model_of_two_workers_is_one_row_without_namesakes():
    ledger = merged(worker(("a", "aa")), worker(("a", "aa")))
    assert list(ledger.entries) == ["own"]
    assert ledger.entries["own"].namesakes == 0


def test_two_models_with_equal_hashes_in_each_worker_stay_two():
    ledger = merged(worker(("a", "aa"), ("b", "aa")), worker(("a", "aa"), ("b", "aa")))
    assert list(ledger.entries) == ["own", "own #2"]


def test_an_error_before_the_arms_were_there_takes_the_row_of_its_name():
    ledger = merged(worker(("a", "")), worker(("a", "aa")), worker(("a", "")))
    assert list(ledger.entries) == ["own"]
    assert ledger.entries["own"].case_hash == "aa"
    assert len(ledger.entries["own"].errors) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_error_of_another_model_splits_no_model(order):
    workers = [worker(("a", "aa"), ("b", "bbb")), worker(("b", "bbb"), ("c", "c")), worker(("d", ""), ("a", "aa"))]
    ledger = merged(*(workers[index] for index in order))
    assert sorted(entry.case_hash for entry in ledger.entries.values() if entry.case_hash) == ["aa", "bbb", "c"]
