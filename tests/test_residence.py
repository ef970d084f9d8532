"""Where two arms do not fit the GPU together, work goes by arm: how often each is built, and in which order."""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import dataclass, field

import pytest

from helpers.fakes import H100, FakeProcess, install
from helpers.pairs import live_pair
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.coroutines import NAME
from pytest_fp8.session_plan import plan_session

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
    planned = plan_session([(case, frozenset(QUESTIONS)) for case in CASES], H100)
    assert [arm for build in planned.builds for arm in build.arms] == told.order


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


def test_a_test_that_names_no_question_gathers_what_it_asks(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.fp8(model="8b", backend="torchao", recipe="tensorwise")
        def test_mine(fp8_pair):
            assert fp8_pair.memory_evidence().bf16
        """
    )
    pytester.runpytest("--fp8-gpu=h100").assert_outcomes(passed=1)
    assert told.order == [REFERENCE, ARMS[0]]


def test_a_test_that_names_no_question_beside_others_has_the_time_measured_first(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        CASES = [Case("8b", "torchao", "tensorwise")]

        @pytest.mark.fp8(cases=CASES, question="layers")
        def test_layers(fp8_pair):
            fp8_pair.assert_layers()

        @pytest.mark.fp8(cases=CASES)
        def test_mine(fp8_pair):
            assert fp8_pair.timing_evidence().bf16
        """
    )
    pytester.runpytest("--fp8-gpu=h100").assert_outcomes(passed=2)
    assert told.order == [REFERENCE, ARMS[0], REFERENCE]
    assert [operations[0] for _, operations in told.residences] == ["blocks"] * 3


def test_an_update_measures_fresh_processes_and_times_each_first(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    assert run(pytester, "--fp8-update-baselines", "--fp8-reason=first", "--fp8-processes=2").ret == 0
    assert told.order == [REFERENCE, ARMS[0], REFERENCE] * 2
    assert all(operations[0] == "blocks" for _, operations in told.residences)


# -- errors -----------------------------------------------------------------------------------------------------------


def fails(monkeypatch, operation, kind, arm=ARMS[0]):
    """The arm ends in an error of this kind when it is asked that; ``died`` and ``hung`` end its process."""
    real = getattr(FakeProcess, operation)

    def failing(self, *arguments, **named):
        if self.spec.case.id == arm:
            if kind in ("died", "hung"):
                self.close()
            raise ArmError(kind, f"it {kind} while it was asked to {operation}")
        return real(self, *arguments, **named)

    monkeypatch.setattr(FakeProcess, operation, failing)


@pytest.mark.parametrize(("kind", "builds"), [("raised", 3), ("out of memory", 3), ("died", 4), ("hung", 4)])
def test_an_arm_that_fails_in_one_question_answers_the_others(pytester, monkeypatch, told, kind, builds):
    install(monkeypatch, H100)
    fails(monkeypatch, "numerics", kind)
    result = run(pytester)
    result.stdout.fnmatch_lines([f"*it {kind} while it was asked to numerics*", "*FAILED *test_numerics*"])
    result.assert_outcomes(failed=1, passed=4)
    assert len(told.order) == builds
    assert told.alive == 0


@pytest.mark.parametrize("operation", ["blocks", "layers", "save", "load"])
def test_what_several_questions_need_fails_each_of_them_and_no_other(pytester, monkeypatch, told, operation):
    install(monkeypatch, H100)
    fails(monkeypatch, operation, "raised")
    result = run(pytester)
    need = {
        "blocks": {"test_speedup", "test_faster"},
        "layers": {"test_layers", "test_numerics", "test_speedup", "test_faster"},
    }.get(operation, {"test_checkpoints"})
    assert {line.split("::")[1].split("[")[0] for line in result.outlines if line.startswith("FAILED")} == need
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_the_tests_of_a_question_share_its_error_and_build_no_arm_again(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    fails(monkeypatch, "blocks", "died")
    result = run(pytester, "-k", "speedup or faster")
    result.assert_outcomes(failed=2)
    assert told.order == [REFERENCE, ARMS[0], ARMS[0]], "the other answers are gathered all the same"


def test_an_arm_that_cannot_be_built_gives_all_questions_its_error(pytester, monkeypatch, told):
    world = install(monkeypatch, H100)
    world.fails[ARMS[0]] = "died"
    result = run(pytester, recipes=RECIPES[:2])
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert len(failed) == 7
    assert all(ARMS[0] in line for line in failed)
    assert told.order.count(ARMS[1]) == 1
    assert told.alive == 0


def test_an_error_of_the_reference_is_no_evidence_for_the_next_case(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    real, left = FakeProcess.memory, [1]

    def once(self):
        if not self.is_fp8 and left:
            left.pop()
            raise ArmError("raised", "it raised once")
        return real(self)

    monkeypatch.setattr(FakeProcess, "memory", once)
    result = run(pytester, recipes=RECIPES[:2])
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert len(failed) == 1
    assert ARMS[0] in failed[0]
    assert "test_memory" in failed[0]


@pytest.fixture
def pair(monkeypatch):
    with live_pair(monkeypatch, H100, Case("8b", "torchao", "tensorwise")) as pair:
        yield pair


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_all_that_gathers(pair, monkeypatch, stop):
    folders, ended = [], []

    def one():
        with tempfile.TemporaryDirectory() as folder:
            folders.append(folder)
            try:
                pair.bf16.request("park")
                pair.fp8.request("restart", seed=0)
            finally:
                ended.append("one")
                pair.bf16.request("park")  # must not hang

    def interrupt(*_, **__):
        raise stop

    monkeypatch.setattr(FakeProcess, "restart", interrupt)
    with pytest.raises(stop):
        pair.gather({"one": one, "two": lambda: pair.fp8.request("park"), "three": lambda: pair.bf16.request("park")})
    assert ended == ["one"]
    import os

    assert not os.path.exists(folders[0])
    assert NAME not in [thread.name for thread in threading.enumerate()]
    assert pair.gather({"again": lambda: pair.bf16.request("park")}) == {}, "the pair can be asked again"


def test_an_interrupt_while_a_question_computes_ends_it_at_its_next_request(pair, monkeypatch):
    import signal

    computing = threading.Event()

    def compute():
        computing.set()
        threading.Event().wait(0.2)
        pair.bf16.request("park")
        raise AssertionError("goes on")

    def press():
        computing.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        pair.gather({"one": compute})
    presses.join()
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_evidence_that_one_question_is_gathering_no_other_asks(pair):
    asked = []

    def layers():
        asked.append("begins")
        pair.fp8.request("park")
        pair.bf16.request("park")
        return "evidence"

    errors = pair.gather({name: lambda: pair.once("layers", layers) for name in ("one", "two", "three")})
    assert not errors
    assert asked == ["begins"]
    assert pair.once("layers", lambda: "another") == "evidence"


def test_who_waits_for_evidence_that_fails_asks_for_itself(pair):
    tries = []

    def ask():
        pair.fp8.request("park")
        tries.append(1)
        if len(tries) == 1:
            raise ArmError("raised", "once")
        return "evidence"

    errors = pair.gather({name: lambda: pair.once("it", ask) for name in ("one", "two")})
    assert [str(error) for error in errors.values()] == ["once"]
    assert pair.once("it", lambda: "another") == "evidence"


def test_a_mistake_in_a_question_is_raised_as_it_is(pytester, monkeypatch):
    install(monkeypatch, H100)
    monkeypatch.setattr(FakeProcess, "memory", lambda self: {"resident": 1})
    result = run(pytester, "-k", "memory")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*PlainDataError*"])


# -- an arm that the GPU cannot hold ----------------------------------------------------------------------------------

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


def test_an_arm_that_no_gpu_of_this_size_holds_is_not_exercised(pytester, monkeypatch, told):
    world = install(monkeypatch, H100)
    tried = []
    world.fails = {f"8b-te-{recipe}": "out of memory" for recipe in ("delayed", "current")}
    begin = FakeProcess.start_build
    monkeypatch.setattr(FakeProcess, "start_build", lambda self, s: (tried.append(s.case.id), begin(self, s))[1])
    pytester.makepyfile(TE)
    result = pytester.runpytest("--fp8-gpu=h100", "--fp8-report-dir=out")
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
    world.fails[ARMS[0]] = "out of memory"
    result = run(pytester, "-k", "layers")
    result.assert_outcomes(failed=1)


def test_where_the_estimate_is_too_high_an_arm_is_asked_all_the_same(pytester, monkeypatch, told):
    install(monkeypatch, H100)
    pytester.makepyfile(TE)
    result = pytester.runpytest("--fp8-gpu=h100", "--fp8-undecided=warn")
    assert result.ret == 0
    assert "does not fit" not in result.stdout.str()
