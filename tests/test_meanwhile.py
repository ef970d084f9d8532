"""Arms of later cases are built while today's pair answers, where there is room; nothing is timed meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.fakes import H100, H200, FakeProcess, install
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.asked import BUILD_SECONDS
from pytest_fp8.arms.meanwhile import PATIENCE_SECONDS
from pytest_fp8.arms.memory_plan import peak_bytes
from pytest_fp8.arms.pair import PairArms, make_arm
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.room import Room
from pytest_fp8.arms.spec import ArmSpec

GIB = 2**30
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture
def world(monkeypatch):
    return install(monkeypatch, H200)


def pairs(pool, model, *recipes):
    return [PairArms(Case(model, "torchao", recipe), pool, None) for recipe in recipes]


def arms_of(*later):
    return [make_arm(case, pair.pool, None, "") for pair in later for case in (pair.case.reference(), pair.case)]


def started(world):
    """The cases whose build was begun and whose process is alive, in order."""
    return [process.spec.case.id for process in world.processes if process.alive and process.spec is not None]


def facts(monkeypatch, **gib):
    said = {"memory": {what: size * GIB for what, size in gib.items()}}
    monkeypatch.setattr(FakeProcess, "receive", lambda self, timeout=0: said)


def test_later_arms_begin_while_the_pair_answers_and_nobody_waits(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three))
    assert started(world) == ["1b-bf16", *(f"1b-torchao-{recipe}" for recipe in RECIPES)]
    assert world.built == ["1b-bf16", "1b-torchao-tensorwise"], "the others have not answered"
    two.start(arms_of(three))
    three.start()
    assert sorted(world.built) == sorted(set(world.built)), "each arm was built once"
    pool.close()
    assert not started(world)


def test_nothing_begins_before_the_pair_is_timed(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    one.start(arms_of(two))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    one.renew()
    assert "1b-torchao-rowwise" in started(world), "a fresh pair closes no arm of a later case"
    pool.close()


@pytest.mark.parametrize(
    ("operation", "waits"),
    [("blocks", True), ("busy", True), ("call", True), ("layers", True), ("curve", False), ("logits", False)],
)
def test_what_is_timed_waits_for_builds_and_nothing_else_does(world, monkeypatch, operation, waits):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    when: list[list[str]] = []
    monkeypatch.setattr(FakeProcess, operation, lambda self, **_: when.append(list(world.built)), raising=False)
    one.fp8.request(operation)
    assert ("1b-torchao-rowwise" in when[0]) is waits
    pool.close()


def test_a_profile_waits_for_no_build_where_no_speed_is_asked(world):
    pool = ArmPool(H200)
    cases = [Case("tiny", "torchao", recipe, questions=("layers", "loss")) for recipe in RECIPES[:2]]
    one, two = (PairArms(case, pool, None) for case in cases)
    one.start(arms_of(two))
    one.fp8.request("layers")
    assert "tiny-torchao-rowwise" not in world.built
    pool.close()


def test_the_arms_of_another_model_begin_and_large_ones_do_not(world):
    pool = ArmPool(H200)
    [tiny], [small], [large] = (pairs(pool, model, "tensorwise") for model in ("tiny", "1b", "8b"))
    tiny.start(arms_of(small, large, tiny))
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise", "1b-bf16", "1b-torchao-tensorwise"]
    small.start(arms_of(large))
    large.start(arms_of(small))
    assert started(world) == ["8b-bf16", "8b-torchao-tensorwise"]
    pool.close()


@pytest.mark.parametrize("gpu", [H100, H200])
def test_no_more_arms_begin_than_fit(world, gpu):
    pool = ArmPool(gpu)
    [first, *later] = pairs(pool, "1b", *RECIPES)
    later += [PairArms(Case("1b", "transformer_engine", r), pool, None) for r in ("delayed", "current", "block")]
    first.start(arms_of(*later))
    assert sum(peak_bytes(process.spec.case) for process in world.processes if process.spec) < gpu.memory
    assert len(started(world)) < 2 + len(later)
    pool.close()


@pytest.mark.parametrize(("peak", "begins"), [(13, True), (26, False)])
def test_what_the_reference_took_tells_what_a_later_arm_takes(world, monkeypatch, peak, begins):
    facts(monkeypatch, peak=peak, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    one.start(arms_of(two))
    assert (started(world)[2:] == ["1b-torchao-rowwise"]) is begins
    pool.close()


def room(**gib):
    """An H100 with arms of these keys that said so: (peak, resident between steps)."""
    said = {key: {"memory": {"peak": peak * GIB, "allocated": held * GIB}} for key, (peak, held) in gib.items()}
    return Room(H100, said)


def arm_of(key, case):
    return Arm(key, ArmSpec(case, "cuda"), pool=None)


def test_what_others_hold_and_what_a_backend_takes_more_than_bf16_count():
    case = Case("1b", "torchao", "tensorwise")
    te = arm_of("te", Case("1b", "transformer_engine", "delayed"))
    torchao = arm_of("torchao", replace(case, recipe="rowwise"))
    reference, mine = arm_of("bf16", case.reference()), arm_of("mine", case)
    pair = [reference, mine]
    at = {"bf16": (19, 7), "mine": (19, 7), "other": (19, 7), case.reference().digest(): (19, 7)}
    assert room(**at).fits(torchao, pair, [], [])
    assert not room(**at).fits(torchao, pair, ["other"], [])
    assert not room(**at).fits(torchao, pair, [], [arm_of("another", case)])
    smaller = dict.fromkeys(at, (18, 7))
    assert room(**smaller).fits(torchao, pair, ["other"], [])
    assert not room(**smaller).fits(te, pair, ["other"], [])
    assert room(**at).holds(pair, ["other"], [torchao])
    assert not room(**at).holds(pair, ["other"], [torchao, te])


def test_on_80_gb_an_arm_of_1b_is_built_while_a_pair_answers(world, monkeypatch):
    """As an H100 said: 20.5 GiB at the peak of a BF16 step and 7 between steps."""
    facts(monkeypatch, peak=20.5, allocated=7)
    pool = ArmPool(H100)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three), timed=True)
    one.start(arms_of(two, three))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    pool.close()


def test_an_arm_that_is_being_built_takes_room_from_steps_that_are_looked_at(world, monkeypatch):
    facts(monkeypatch, peak=14, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two), timed=True)
    assert pool.side_by_side(one.fp8, one.bf16)
    one.start(arms_of(two))
    assert not pool.side_by_side(one.fp8, one.bf16)
    assert not pool.tight(one.fp8, one.bf16)
    pool.close()


def test_an_arm_that_fails_ahead_is_built_again_for_its_own_test_alone(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    world.fails["1b-torchao-rowwise"] = "died"
    one.start(arms_of(two))
    pool.wait_for_builds()
    one.start(arms_of(two))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"], "it is not tried ahead again"
    with pytest.raises(ArmError, match="1b-torchao-rowwise"):
        two.start()
    assert started(world) == ["1b-bf16"]
    del world.fails["1b-torchao-rowwise"]
    two.start()
    assert started(world) == ["1b-bf16", "1b-torchao-rowwise"]
    pool.close()


def test_a_test_waits_less_long_for_another_s_arm_than_that_one_may_take(world, monkeypatch):
    waits: dict[str, float] = {}
    receive = FakeProcess.receive

    def noted(self, timeout=0):
        waits[self.spec.case.id] = timeout
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", noted)
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    pool.wait_for_builds()
    assert waits["1b-torchao-rowwise"] < waits["1b-torchao-tensorwise"] == BUILD_SECONDS
    pool.close()


def test_a_process_that_cannot_be_started_ahead_stops_no_other_test(world, monkeypatch):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(timed=True)

    def fail(self, spec):
        raise ArmError("died", "no process")

    monkeypatch.setattr(FakeProcess, "start_build", fail)
    alive = sum(process.alive for process in world.processes)
    one.start(arms_of(two))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    assert sum(process.alive for process in world.processes) == alive, "the one that was asked was closed"
    pool.close()


def test_an_arm_of_which_the_next_pair_has_no_use_ends(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two))
    assert "1b-torchao-rowwise" in started(world)
    three.start()
    assert started(world) == ["1b-bf16", "1b-torchao-rowwise_with_gw_hp"]
    pool.close()


@pytest.fixture
def slow_rehearsals(monkeypatch):
    """Rehearsals do not answer until this list is filled."""
    answers: list[bool] = []
    done = property(lambda self: bool(answers) or self.spec is None or not self.spec.rehearses)
    monkeypatch.setattr(FakeProcess, "has_answered", done)
    return answers


def rehearsals(pool, *recipes):
    cases = [Case("8b1", "torchao", recipe) for recipe in recipes]
    return [make_arm(each, pool, None, "", rehearses=True) for case in cases for each in (case.reference(), case)]


def test_a_rehearsal_leaves_no_process(world):
    pool = ArmPool(H200)
    [tiny] = pairs(pool, "tiny", "tensorwise")
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world)[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise"], "they are closed, and not begun again"
    assert world.built.count("8b1-torchao-rowwise") == 1
    pool.close()


def test_a_rehearsal_that_is_not_done_is_stopped_for_what_is_timed_and_begins_again(world, slow_rehearsals):
    pool = ArmPool(H200)
    [tiny] = pairs(pool, "tiny", "tensorwise")
    tiny.start(rehearsals(pool, "rowwise"))
    pool.wait_for_builds()
    assert started(world) == ["tiny-bf16", "tiny-torchao-tensorwise"]
    assert not any(name.startswith("8b1") for name in world.built), "nobody waited for it"
    tiny.start(rehearsals(pool, "rowwise"))
    assert started(world)[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    slow_rehearsals.append(True)
    pool.wait_for_builds()
    assert world.built[2:] == ["8b1-bf16", "8b1-torchao-rowwise"]
    pool.close()


def test_one_layer_as_a_case_of_its_own_is_no_rehearsal(world):
    pool = ArmPool(H200)
    tiny, mine = pairs(pool, "tiny", "tensorwise")[0], pairs(pool, "8b1", "rowwise")[0]
    tiny.start([*rehearsals(pool, "rowwise"), *arms_of(mine)])
    mine.start()
    assert started(world) == ["8b1-bf16", "8b1-torchao-rowwise"]
    assert mine.fp8.request("logits", seed=0)
    pool.close()


def test_builds_under_way_make_room_for_the_next_pair(world, slow_rehearsals):
    """On an H100 two arms of 1B and four rehearsals would take 112 GiB, as estimated."""
    pool = ArmPool(H100)
    [tiny], [small] = pairs(pool, "tiny", "tensorwise"), pairs(pool, "1b", "tensorwise")
    tiny.start(rehearsals(pool, *RECIPES))
    assert len(started(world)) == 2 + 4
    small.start(rehearsals(pool, *RECIPES), timed=True)
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    pool.close()


@pytest.mark.parametrize(("always", "turns"), [(False, False), (True, True)])
def test_a_pair_without_memory_is_built_once_more_without_what_was_built_ahead(world, monkeypatch, always, turns):
    receive = FakeProcess.receive

    def crowded(self, timeout=0):
        others = [each for each in world.processes if each.alive and each.spec and each is not self]
        if self.spec.case.recipe == "rowwise" and (always or len(others) > 1):
            raise ArmError("out of memory", "no room")
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", crowded)
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(three), timed=True)
    one.start(arms_of(three))
    two.start(arms_of(three))
    assert pool.takes_turns(two.fp8) is turns
    assert started(world)[0] == "1b-bf16", "what was built stays"
    pool.close()


def test_a_process_with_its_imports_done_waits_for_the_next_pair_and_for_no_build_ahead(world):
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(then=arms_of(two), timed=True)
    spares = {process.pid for process in world.processes if process.spec is None}
    assert spares
    one.start(arms_of(three), arms_of(two))
    assert "1b-torchao-rowwise_with_gw_hp" in started(world)
    assert {process.pid for process in world.processes if process.alive and process.spec is None} == spares
    two.start(arms_of(three))
    assert any(process.pid in spares for process in world.processes if process.spec and process.alive)
    pool.close()


def test_an_arm_that_was_built_ahead_and_closed_is_begun_again(world):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    pool.wait_for_builds()
    pool.close_all()
    one.start(arms_of(two))
    assert "1b-torchao-rowwise" in started(world)
    one.start()
    one.start(arms_of(two))
    assert started(world).count("1b-torchao-rowwise") == 1, "also where its build was ended"
    pool.close()


def test_what_is_not_compiled_is_expected_to_take_more_than_a_compiled_reference(world, monkeypatch):
    facts(monkeypatch, peak=19, allocated=7)
    pool = ArmPool(H100)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    eager = PairArms(Case("1b", "torchao", "rowwise", compile=False), pool, None)
    one.start(timed=True)
    one.start(arms_of(eager))
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    one.start(arms_of(two))
    assert started(world)[2:] == ["1b-torchao-rowwise"]
    pool.close()


def test_waits_for_builds_that_hang_end_together(world, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pytest_fp8.arms.meanwhile.time.monotonic", lambda: now[0])
    receive = FakeProcess.receive

    def hangs(self, timeout=0):
        if self.spec.case.recipe.startswith("rowwise"):
            now[0] += timeout
            raise ArmError("hung", "no answer")
        return {**receive(self, timeout), "memory": {"peak": 13 * GIB, "allocated": 7 * GIB}}

    monkeypatch.setattr(FakeProcess, "receive", hangs)
    pool = ArmPool(H200)
    one, two, three = pairs(pool, "1b", *RECIPES)
    one.start(arms_of(two, three), timed=True)
    one.start(arms_of(two, three))
    assert len(started(world)) == 4
    pool.wait_for_builds()
    assert now[0] < PATIENCE_SECONDS + 5
    assert started(world) == ["1b-bf16", "1b-torchao-tensorwise"]
    pool.close()


def test_not_more_than_five_builds_are_under_way(world, monkeypatch):
    monkeypatch.setattr(FakeProcess, "has_answered", False)
    pool = ArmPool(H200)
    [first, *later] = pairs(pool, "tiny", *RECIPES)
    later += [PairArms(Case("tiny", "transformer_engine", r), pool, None) for r in ("delayed", "current", "block")]
    first.start(arms_of(*later, *pairs(pool, "1b", "tensorwise")))
    assert len(started(world)) == 2 + 5
    pool.close()
    assert not started(world)


def test_an_interrupt_while_a_build_is_waited_for_leaves_no_process(world, monkeypatch):
    pool = ArmPool(H200)
    one, two = pairs(pool, "1b", *RECIPES[:2])
    one.start(arms_of(two))
    receive = FakeProcess.receive

    def interrupted(self, timeout=0):
        if self.spec.case.id == "1b-torchao-rowwise":
            # As the real one does.
            self.close()
            raise KeyboardInterrupt
        return receive(self, timeout)

    monkeypatch.setattr(FakeProcess, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.wait_for_builds()
    pool.close()
    assert not [process for process in world.processes if process.alive]


SESSION = """
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("1b", "torchao", recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")]
"""
BUILDING = """
    def begun():
        from helpers.fakes import FakeProcess
        return {each.spec.case.id for each in FakeProcess.world.processes if each.alive and each.spec is not None}

    def building():
        from helpers.fakes import FakeProcess
        return sorted(begun() - {*FakeProcess.world.built})
"""


def test_a_session_begins_what_comes_next_and_asks_each_arm_once(pytester, world):
    pytester.makepyfile(
        SESSION
        + BUILDING
        + """
    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()

    @pytest.mark.fp8(cases=CASES, question="memory")
    def test_memory(fp8_pair):
        if fp8_pair.case.recipe == "tensorwise":
            assert "1b-torchao-rowwise" in begun()
        fp8_pair.assert_memory()
"""
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] == 3, "of the memory there is no baseline"
    assert sorted(world.built) == sorted(set(world.built))
    assert len(world.built) == 4


ALL_IN_ONE = """
    @pytest.mark.fp8(cases=CASES)
    def test_all(fp8_pair):
        before = begun()
        fp8_pair.assert_faster()
        fp8_pair.layers()
        if fp8_pair.case.recipe == "tensorwise":
            assert before == {"1b-bf16", "1b-torchao-tensorwise"}
            assert "1b-torchao-rowwise" in begun()
"""
SPEED_ALONE = """
    @pytest.mark.fp8(cases=CASES, question="speedup")
    def test_faster(fp8_pair):
        if fp8_pair.case.recipe == "tensorwise":
            assert building() == ["1b-torchao-rowwise", "1b-torchao-rowwise_with_gw_hp"]
        fp8_pair.assert_faster()
"""


@pytest.mark.parametrize("tests", [ALL_IN_ONE, SPEED_ALONE])
def test_arms_are_built_ahead_whatever_a_test_asks(pytester, world, tests):
    pytester.makepyfile(SESSION + BUILDING + tests)
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=3)
    assert len(world.built) == 4


def test_a_test_that_asks_no_arms_waits_for_builds_and_has_none_begun_for_it(pytester, world):
    pytester.makepyfile(
        SESSION
        + BUILDING
        + """
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="tensorwise", question="memory")
    def test_memory(fp8_pair):
        assert building() == ["1b-bf16", "1b-torchao-tensorwise"]
        fp8_pair.memory()

    def test_of_ones_own():
        assert building() == []

    @pytest.mark.fp8(cases=CASES[:1])
    def test_later(fp8_pair):
        fp8_pair.memory()

    @pytest.mark.fp8(cases=CASES[1:])
    def test_no_arms(fp8_case):
        assert building() == []
"""
    )
    assert pytester.runpytest("--fp8-gpu=h200").parseoutcomes() == {"passed": 3, "not": 2}, "not exercised"
    assert not [name for name in world.built if "rowwise" in name]
