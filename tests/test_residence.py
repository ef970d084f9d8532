"""Where two arms do not fit the GPU together, work goes by arm: how often each is built, and in which order."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from helpers.fakes import H100, FakeProcess, install
from pytest_fp8 import Case

QUESTIONS = ("layers", "numerics", "loss", "speedup", "memory", "checkpoints")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
WEIGHTS = {"checkpoint_formats": ("safetensors",), "resume": False}
CASES = [Case("8b", "torchao", recipe, **WEIGHTS) for recipe in RECIPES]
SUITE = """
    import pytest
    from pytest_fp8 import Case

    CASES = [
        Case("8b", "torchao", recipe, checkpoint_formats=("safetensors",), resume=False)
        for recipe in {recipes}
    ]

    @pytest.mark.fp8(cases=CASES, question="layers")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    @pytest.mark.fp8(cases=CASES, question="numerics")
    def test_numerics(fp8_pair):
        fp8_pair.assert_numerics()

    @pytest.mark.fp8(cases=CASES, question="loss")
    def test_loss(fp8_pair):
        fp8_pair.assert_loss()

    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_speedup(fp8_pair):
        fp8_pair.assert_speedup()

    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()

    @pytest.mark.fp8(cases=CASES, question="memory")
    def test_memory(fp8_pair):
        fp8_pair.assert_memory()

    @pytest.mark.fp8(cases=CASES, question="checkpoints")
    def test_checkpoints(fp8_pair):
        fp8_pair.assert_checkpoints()
"""
REFERENCE, ARMS = "8b-bf16", [f"8b-torchao-{recipe}" for recipe in RECIPES]


@dataclass
class Told:
    """What a session's arms were asked to, one list for each process that became an arm."""

    residences: list[tuple[str, list[str]]] = field(default_factory=list)
    alive: int = 0
    most_alive: int = 0

    @property
    def order(self):
        return [arm for arm, _ in self.residences]


@pytest.fixture
def told(monkeypatch):
    seen = Told()
    receive, request, close = FakeProcess.receive, FakeProcess.request, FakeProcess.close

    def note_build(self, timeout=0):
        building = self.asked is None
        answer = receive(self, timeout)
        if building:
            assert threading.current_thread() is threading.main_thread(), "the kernel ends an arm with its thread"
            self.told = []
            seen.residences.append((self.spec.case.id, self.told))
            seen.alive += 1
            seen.most_alive = max(seen.alive, seen.most_alive)
        return answer

    def note_request(self, operation, timeout=0, **arguments):
        assert threading.current_thread() is threading.main_thread()
        self.told.append(operation)
        return request(self, operation, timeout, **arguments)

    def note_close(self):
        seen.alive -= self.alive and hasattr(self, "told")
        close(self)

    monkeypatch.setattr(FakeProcess, "receive", note_build)
    monkeypatch.setattr(FakeProcess, "request", note_request)
    monkeypatch.setattr(FakeProcess, "close", note_close)
    return seen


def run(pytester, *options, recipes=RECIPES[:1]):
    pytester.makepyfile(SUITE.format(recipes=recipes))
    return pytester.runpytest("--fp8-gpu=h100", "--fp8-undecided=warn", *options)


def test_one_case_takes_three_builds_and_one_arm_is_resident(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    result = run(pytester)
    assert result.ret == 0
    assert told.order == [REFERENCE, ARMS[0], REFERENCE]
    assert told.most_alive == 1
    assert told.alive == 0, "nothing is left"


def test_the_reference_between_two_cases_serves_both(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    assert run(pytester, recipes=RECIPES).ret == 0
    first, second, third = ARMS
    assert told.order == [REFERENCE, first, REFERENCE, second, REFERENCE, third, REFERENCE]


def test_timing_comes_first_in_each_residence(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    run(pytester, recipes=RECIPES)
    for arm, operations in told.residences:
        timed = max(index for index, operation in enumerate(operations) if operation == "blocks")
        others = [operation for operation in operations[:timed] if operation not in ("blocks", "park")]
        between = arm == REFERENCE and told.residences[0][1] is not operations
        assert not {"layers", "ledger", "numerics"} & set(others), (arm, operations)
        assert between or not others


def test_nothing_is_asked_twice_of_the_reference(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    run(pytester, recipes=RECIPES)
    asked = [op for arm, operations in told.residences if arm == REFERENCE for op in operations]
    for once in ("layers", "ledger", "numerics", "memory", "restart", "save"):
        assert asked.count(once) == 1, once
    assert asked.count("load") == 3, "each case's checkpoint"
    for arm, operations in told.residences:
        if arm != REFERENCE:
            assert [operations.count(once) for once in ("layers", "ledger", "numerics", "memory")] == [1] * 4


@pytest.mark.parametrize(
    ("named", "order"),
    [
        ("layers or memory or numerics", [REFERENCE, *ARMS]),
        ("loss", [REFERENCE, *ARMS]),
        ("speedup", [REFERENCE, ARMS[0], REFERENCE, ARMS[1], REFERENCE, ARMS[2], REFERENCE]),
    ],
)
def test_no_more_is_built_than_the_selected_tests_need(pytester, monkeypatch, told, named, order):
    install(monkeypatch, H100)
    run(pytester, "-k", named, recipes=RECIPES)
    assert told.order == order
