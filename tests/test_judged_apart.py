"""Tests of one case that ask otherwise: another floor, other questions, other checkpoints. Its own mark judges each."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, FakeProcess, install
from pytest_fp8.case import Case
from pytest_fp8.markers import one_of_each
from pytest_fp8.report.files import read_report

SPEED = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", {first})])
    def test_first(fp8_pair, fp8_case):
        assert fp8_pair.case == fp8_case
        {ask_first}

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", {second})])
    def test_second(fp8_pair, fp8_case):
        assert fp8_pair.case == fp8_case
        {ask_second}
"""
FASTER = {"ask_first": "fp8_pair.assert_faster()", "ask_second": "fp8_pair.assert_faster()"}


@pytest.fixture
def requests(monkeypatch):
    """(process, operation, arguments) of every request to a fake arm."""
    asked = []
    real = FakeProcess.request

    def noted(self, operation, timeout=0, **arguments):
        asked.append((self.pid, operation, arguments))
        return real(self, operation, timeout, **arguments)

    monkeypatch.setattr(FakeProcess, "request", noted)
    return asked


@pytest.mark.parametrize("swapped", [False, True])
def test_each_test_is_held_to_the_floor_of_its_own_mark(pytester, monkeypatch, swapped):
    floors = ("floor=1.5", "floor=1.0") if swapped else ("floor=1.0", "floor=1.5")
    install(monkeypatch, H200, speedup=1.2)
    pytester.makepyfile(SPEED.format(first=floors[0], second=floors[1], **FASTER))
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*expected: above floor 1.50x*"])
    [row] = read_report(pytester.path / "out").entries.values()
    assert row.namesakes == 0
    assert row.decisions["faster"].verdict == "FAIL", "whichever test was asked last"


def test_tests_of_one_case_share_its_arms_and_its_blocks(pytester, monkeypatch, requests):
    def blocks():
        requests.clear()
        assert pytester.runpytest("--fp8-gpu=h200", "-k", chosen).ret == 0
        return [asked[1:] for asked in requests if asked[1] == "blocks"]

    world = install(monkeypatch, H200, speedup=1.2)
    pytester.makepyfile(SPEED.format(first="floor=1.0", second="floor=1.1", **FASTER))
    chosen = "test_first"
    alone = blocks()
    world.built.clear()
    chosen = "test_first or test_second"
    assert blocks() == alone
    assert sorted(world.built) == sorted(set(world.built))


def test_questions_left_out_by_one_mark_are_asked_by_the_other(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=1.2)
    asks = {"ask_first": "fp8_pair.assert_layers()", "ask_second": "fp8_pair.assert_faster()"}
    pytester.makepyfile(SPEED.format(first="questions=('layers',)", second="", **asks))
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(passed=2)


def test_each_test_has_the_checkpoints_it_asks_for(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    asks = {"ask_first": "fp8_pair.assert_checkpoints()", "ask_second": "fp8_pair.assert_checkpoints()"}
    pytester.makepyfile(SPEED.format(first="checkpoint_formats=('dcp',), resume=False", second="", **asks))
    assert pytester.runpytest("--fp8-gpu=h200", "-k", "test_first").ret == 0
    assert {(a["store"], a["optimizer"]) for _, name, a in requests if name == "save"} == {("dcp", False)}
    requests.clear()
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    assert {a["store"] for _, name, a in requests if name == "save"} == {"dcp", "safetensors"}
    assert any(a["optimizer"] for _, name, a in requests if name == "save")
    assert any(name == "resume" for _, name, _ in requests)


@pytest.mark.parametrize(("floor", "emulated"), [("0", False), ("float('nan')", True), ("'1.0'", False)])
def test_a_floor_that_nothing_can_be_held_against_is_refused(pytester, monkeypatch, floor, emulated):
    install(monkeypatch, None if emulated else H200)
    asks = {"ask_first": f"fp8_pair.assert_faster({floor})", "ask_second": "pass"}
    mark = "emulated=True" if emulated else ""
    pytester.makepyfile(SPEED.format(first=mark, second=mark, **asks))
    result = pytester.runpytest("-k", "test_first")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*floor of a case", "*expected: a speedup over BF16 above 0*", "*seen: *", "*next: *"])


def test_a_question_that_the_mark_leaves_out_names_the_mark(pytester, monkeypatch):
    install(monkeypatch, H200)
    asks = {"ask_first": "fp8_pair.assert_memory()", "ask_second": "fp8_pair.assert_faster()"}
    pytester.makepyfile(SPEED.format(first="questions=('layers',)", second="questions=('layers',)", **asks))
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(failed=2)
    named = [f"*expected: '{question}' among the questions of the mark*" for question in ("memory", "speedup")]
    result.stdout.fnmatch_lines(named)


@pytest.mark.parametrize("asked", ["layers", "memory"])
def test_a_speed_is_timed_on_processes_that_no_test_had_profiled(pytester, monkeypatch, requests, asked):
    install(monkeypatch, H200, speedup=1.2)
    asks = {
        "ask_first": "fp8_pair.assert_layers()",
        "ask_second": f"fp8_pair.assert_{asked}(); fp8_pair.assert_faster()",
    }
    pytester.makepyfile(SPEED.format(first="questions=('layers',)", second="", **asks))
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    profiled, timed = set(), []
    for process, operation, _ in requests:
        if operation == "layers":
            profiled.add(process)
        if operation == "blocks":
            timed.append(process)
            assert process not in profiled
    assert timed


def test_a_known_fail_of_one_test_does_not_stand_for_the_missing_answer_of_another(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=1.2)
    pytester.makepyfile(SPEED.format(first="floor=9.0", second="questions=('layers',)", **FASTER))
    pytester.makeconftest("""
        import pytest

        def pytest_collection_modifyitems(items):
            items[0].add_marker(pytest.mark.xfail(reason="known slow"))
    """)
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    result.stdout.fnmatch_lines(["*1 of 1 questions have no answer on the declared GPU*", "*faster: NOT_EXERCISED*"])
    assert result.ret == 1
    [row] = read_report(pytester.path / "out").entries.values()
    assert row.decisions["faster"].verdict == "FAIL"
    assert [answer.verdict for answer in row.asserted()] == ["NOT_EXERCISED"]


def test_the_session_counts_tests_of_one_case_once_with_all_that_they_ask():
    first = Case("tiny", "torchao", "rowwise", questions=("layers",))
    second = Case("tiny", "torchao", "rowwise", floor=1.5)
    other = Case("tiny", "torchao", "tensorwise")
    found = one_of_each([first, other, second])
    assert [case.id for case in found] == [first.id, other.id]
    assert set(found[0].questions) == set(second.questions)
    assert one_of_each([second, other, first])[0] == second


def test_cases_that_are_judged_apart_have_one_hash():
    plain = Case("tiny", "torchao", "rowwise")
    strict = Case("tiny", "torchao", "rowwise", floor=1.5, tolerance=0.01, resume=False)
    assert plain.digest() == strict.digest()
    assert plain.judged_by != strict.judged_by
