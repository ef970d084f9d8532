"""Whole sessions on a GPU that is not there: arms answer by hand, everything else is real. What runs, what each test is
held to, what is said at the end, and whether the session is green."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.fakes import A100, B200, H100, H200, L40S, SUITE, FakeProcess, asks, install, update
from pytest_fp8 import Case, markers
from pytest_fp8.codes import C, L, M, R, S
from pytest_fp8.markers import one_of_each
from pytest_fp8.options import Settings
from pytest_fp8.pairs import Pairs
from pytest_fp8.questions.speed import check as question
from pytest_fp8.report.files import read_report
from pytest_fp8.report.record import Notes
from pytest_fp8.stats.looks import BASELINE_BLOCKS

GATE = ("--fp8-gpu=h200",)


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE + asks("checkpoints"))
    return pytester


# -- baselines --------------------------------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("ci", "options", "outcomes", "code"),
    [
        (False, (), {"passed": 8}, 0),
        (True, (), {"passed": 8}, 1),
        (False, ("--fp8-strict",), {"passed": 8, "failed": 4}, 1),
    ],
    ids=["by hand", "in CI", "strict"],
)
def test_without_baselines_a_session_says_what_was_not_exercised(suite, monkeypatch, ci, options, outcomes, code):
    install(monkeypatch, H200)
    if ci:
        monkeypatch.setenv("CI", "true")
    result = suite.runpytest(*GATE, *options)
    assert outcomes.items() <= result.parseoutcomes().items()
    assert result.ret == code
    if options:
        result.stdout.fnmatch_lines(["*NOT_EXERCISED FP8-S01: no baseline to hold the speedup against*"])
    else:
        result.stdout.fnmatch_lines(["*tiny-torchao-rowwise*2/3*1.[12]*x (none)*", "*tiny-te-current*2/3*"])
        result.stdout.fnmatch_lines(["*no baseline for 2 case(s) on h200*", "*8 passed, 4 not exercised*"])


@pytest.mark.oldest
def test_an_update_writes_and_a_second_run_passes_against_it(suite, monkeypatch):
    world = install(monkeypatch, H200)
    first = suite.runpytest(*update())
    assert first.ret == 0
    first.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    stored = json.loads((suite.path / "baselines/h200/tiny-te-current.json").read_text())
    [session] = stored["sessions"]
    assert (stored["schema"], session["reason"]) == (3, "first")
    # Raw values of four fresh processes: one per block, not a mean.
    assert [len(values) for values in session["metrics"]["speedup"]] == [BASELINE_BLOCKS] * 4
    world.built.clear()
    second = suite.runpytest(*GATE, "--fp8-strict")
    second.assert_outcomes(passed=12)
    second.stdout.fnmatch_lines(["*1.[12]*x (1.[12]*)*0.90x*yes*"])
    assert sorted(world.built) == ["tiny-bf16", "tiny-te-current", "tiny-torchao-rowwise"], "once for all questions"
    assert world.closed >= len(world.built)


CHANGES = [
    ({"speedup": 1.1}, "test_speedup", f"FAIL {S.SLOWER_THAN_BASELINE}: "),
    ({"fp8_memory": 120}, "test_memory", f"FAIL {M.MORE_MEMORY}: "),
    ({"nan_at": 20}, "test_loss", f"FAIL {C.NOT_FINITE}: *from step 20 on"),
    ({"executed_roles": ("fprop",)}, "test_layers", f"FAIL {L.DGRAD_NOT_IN_FP8}: *2 of 2 layers"),
    ({"recipe": {"recipe": "tensorwise"}}, "test_layers", f"FAIL {L.OTHER_RECIPE}: "),
    ({"speedup": 1.3}, "test_speedup", f"IMPROVED {S.FASTER_THAN_BASELINE}: FP8 is faster than its baseline"),
]


def test_what_changed_since_the_baseline_fails_its_own_test_or_asks_for_a_new_one(suite, monkeypatch):
    install(monkeypatch, H200)
    assert suite.runpytest(*update(), "-k", "rowwise").ret == 0
    for change, test, says in CHANGES:
        install(monkeypatch, H200, **change)
        result = suite.runpytest(*GATE, "--fp8-strict", "-k", f"{test} and rowwise")
        assert result.ret == says.startswith("FAIL"), change
        result.stdout.fnmatch_lines([f"*{says}*", "*expected:*", "*seen:*", "*next:*"][: None if result.ret else 1])


@pytest.mark.parametrize(
    ("world", "chosen", "says"),
    [
        ({}, "test_memory", "the layers question was not asked in this run: select that test, too)"),
        (
            {"spreads": True},
            "(test_speedup or test_layers) and rowwise",
            "its processes spread too much to gate at 2.0%",
        ),
    ],
    ids=["not asked", "too coarse"],
)
def test_an_update_is_refused_where_it_would_hold_nothing(suite, monkeypatch, world, chosen, says):
    install(monkeypatch, H200, **{name: value for name, value in world.items() if name != "spreads"})
    if "spreads" in world:
        spread = iter([1.2, 1.2, 1.26, 1.26, 1.15, 1.15, 1.31, 1.31] * 2)
        real = FakeProcess.start_build

        def build(self, spec):
            real(self, spec)
            self.world.speedup = next(spread, 1.2)

        monkeypatch.setattr(FakeProcess, "start_build", build)
    result = suite.runpytest(*update(), "-k", chosen)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*{says}*"])
    assert not list((suite.path / "baselines").rglob("*.json"))


# -- failures and their report ----------------------------------------------------------------------------------------


@pytest.mark.oldest
@pytest.mark.parametrize(
    ("change", "why"),
    [({"strangers": (4242,)}, "another process used the GPU"), ({"attention": "fmha"}, "different attention kernels")],
)
def test_a_disturbed_measurement_is_invalid_and_fails_a_gate(suite, monkeypatch, change, why):
    install(monkeypatch, H200, **change)
    result = suite.runpytest(*GATE, "--junitxml=out.xml", "-k", "test_faster and rowwise")
    result.stdout.fnmatch_lines(
        [
            f"*INVALID*{why}*",
            "FP8-R45: 1 of 1 questions have no answer on the declared GPU. *",
            f"  tiny-torchao-rowwise faster: INVALID*: *{why}*",
            "*next: *",
            "*1 invalid*",
        ]
    )
    assert result.ret == 1
    text = (suite.path / "out.xml").read_text()
    assert '<property name="fp8_verdict" value="INVALID"' in text
    assert '<property name="fp8_case" value="tiny-torchao-rowwise"' in text
    assert suite.runpytest("-k", "test_faster and rowwise").ret == 0, "no GPU was declared"


def test_a_checkpoint_that_arrives_changed_is_no_yes_in_the_table(suite, monkeypatch):
    install(monkeypatch, H200)
    real = FakeProcess.load
    monkeypatch.setattr(FakeProcess, "load", lambda *args, **more: {**real(*args, **more), "digests": {"w": 2}})
    result = suite.runpytest(*GATE, "-k", "test_checkpoints and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.re_match_lines(
        [r" *tiny-torchao-rowwise \[1\] +FAIL$", r"\[1\] checkpoints: FAIL FP8-K07: .*: see above"]
    )


def test_an_arm_that_fails_ahead_of_its_turn_fails_its_own_tests_alone(suite, monkeypatch):
    install(monkeypatch, H200, fails={"tiny-te-current": R.ARM_DIED})
    result = suite.runpytest(*GATE)
    outcome = result.parseoutcomes()
    assert outcome["errors"] == 6
    assert outcome["passed"] == 4, "the other case's questions, two of which have no baseline"
    result.stdout.fnmatch_lines(["*the arm 'tiny-te-current on cuda' failed*"])


@pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="pytest 9 brought subtests")
def test_what_subtests_ask_counts_with_their_test_and_is_said_as_any_failure_is(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
        def test_it(subtests, fp8_pair):
            with subtests.test("layers"):
                fp8_pair.assert_layers()
            with subtests.test("loss"):
                fp8_pair.assert_loss()
            with subtests.test("memory"):
                pytest.skip("not today")
        """
    )
    install(monkeypatch, H200, nan_at=3)
    monkeypatch.setenv("COLUMNS", "200")
    result = pytester.runpytest(*GATE, "--fp8-report=out", "--junitxml=out/junit.xml")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["SUBFAILED*test_it*- FAIL FP8-C13: the FP8 arm's loss is not finite*"])
    assert "not run" not in result.stdout.str()
    assert '"ran_on_gpu": 1' in (pytester.path / "out" / "report.json").read_text()
    assert 'name="fp8_code" value="FP8-C13"' in (pytester.path / "out" / "junit.xml").read_text()


# -- tests of one case that ask otherwise: its own mark judges each ---------------------------------------------------

TWO = """
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
FASTER = "fp8_pair.assert_faster()"
LAYERS = "fp8_pair.assert_layers()"


@pytest.fixture
def two(pytester):
    def make(first="", second="", ask_first=FASTER, ask_second=FASTER):
        pytester.makepyfile(TWO.format(first=first, second=second, ask_first=ask_first, ask_second=ask_second))
        return pytester

    return make


@pytest.mark.parametrize("floors", [("floor=1.0", "floor=1.5"), ("floor=1.5", "floor=1.0")])
def test_each_test_is_held_to_the_floor_of_its_own_mark(two, monkeypatch, floors):
    install(monkeypatch, H200, speedup=1.2)
    tests = two(*floors)
    result = tests.runpytest(*GATE, "--fp8-report=out", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*expected: above floor 1.50x*"])
    [row] = read_report(tests.path / "out").entries.values()
    assert row.namesakes == 0
    assert row.decisions["faster"].verdict == "FAIL", "whichever test was asked last"


def test_each_test_has_the_questions_and_the_checkpoints_of_its_own_mark(two, monkeypatch):
    requests = install(monkeypatch, H200, speedup=1.2).asked
    tests = two("questions=('layers',)", "", LAYERS, FASTER)
    tests.runpytest(*GATE, "--fp8-strict").assert_outcomes(passed=2)
    tests = two("questions=('layers',)", "questions=('layers',)", "fp8_pair.assert_memory()", FASTER)
    result = tests.runpytest(*GATE, "--fp8-strict")
    result.assert_outcomes(failed=2)
    named = [f"*expected: '{question}' among the questions of the mark*" for question in ("memory", "speedup")]
    result.stdout.fnmatch_lines(named)
    requests.clear()
    ask = "fp8_pair.assert_checkpoints()"
    tests = two("checkpoint_formats=('dcp',), resume=False", "", ask, ask)
    assert tests.runpytest(*GATE, "-k", "test_first").ret == 0
    assert {(a["store"], a["optimizer"]) for _, name, a in requests if name == "save"} == {("dcp", False)}
    requests.clear()
    assert tests.runpytest(*GATE).ret == 0
    assert {a["store"] for _, name, a in requests if name == "save"} == {"dcp", "safetensors"}
    assert any(name == "resume" for _, name, _ in requests)


@pytest.mark.parametrize(("floor", "mark"), [("0", ""), ("float('nan')", "emulated=True"), ("'1.0'", "")])
def test_a_floor_that_nothing_can_be_held_against_is_refused(two, monkeypatch, floor, mark):
    install(monkeypatch, None if mark else H200)
    result = two(mark, mark, f"fp8_pair.assert_faster({floor})", "pass").runpytest("-k", "test_first")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*floor of a case", "*expected: a speedup over BF16 above 0*", "*seen: *", "*next: *"])


def test_a_known_fail_of_one_test_does_not_stand_for_the_missing_answer_of_another(two, monkeypatch):
    install(monkeypatch, H200, speedup=1.2)
    tests = two("floor=9.0", "questions=('layers',)")
    tests.makeconftest("""
        import pytest

        def pytest_collection_modifyitems(items):
            items[0].add_marker(pytest.mark.xfail(reason="known slow"))
    """)
    result = tests.runpytest(*GATE, "--fp8-report=out")
    result.stdout.fnmatch_lines(["*1 of 1 questions have no answer on the declared GPU*", "*faster: NOT_EXERCISED*"])
    assert result.ret == 1
    [row] = read_report(tests.path / "out").entries.values()
    assert row.decisions["faster"].word == "NOT_EXERCISED", "worse than a failure that was expected"
    assert [answer.verdict for answer in row.asserted()] == ["NOT_EXERCISED"]


def test_the_session_counts_tests_of_one_case_once_with_all_that_they_ask():
    first = Case("tiny", "torchao", "rowwise", questions=("layers",))
    second = Case("tiny", "torchao", "rowwise", floor=1.5)
    other = Case("tiny", "torchao", "tensorwise")
    assert first.digest() == second.digest()
    assert first.judged_by != second.judged_by
    found = one_of_each([first, other, second])
    assert [case.id for case in found] == [first.id, other.id]
    assert set(found[0].questions) == set(second.questions)
    assert one_of_each([second, other, first])[0] == second


# -- the order of questions -------------------------------------------------------------------------------------------


OF_LAYERS, OF_ALL = ", question='layers'", ""


@pytest.mark.parametrize(
    ("tests", "order"),
    [
        ([(OF_LAYERS, LAYERS)], ["layers"]),
        # Speed is measured before presence, where a test may ask for it.
        ([(OF_LAYERS, LAYERS), (OF_ALL, FASTER)], ["blocks", "layers"]),
        ([(OF_ALL, f"{LAYERS}; {FASTER}")], ["blocks", "layers"]),
        ([(OF_LAYERS, LAYERS), (OF_ALL, f"fp8_pair.assert_memory(); {FASTER}")], ["blocks", "layers"]),
        # Speed that was not announced is measured in other processes.
        ([(OF_LAYERS, f"{LAYERS}; {FASTER}")], ["layers", "blocks"]),
    ],
)
def test_speed_is_timed_on_processes_that_nobody_profiled(pytester, monkeypatch, tests, order):
    requests = install(monkeypatch, H200, speedup=1.2).asked
    case = "@pytest.mark.fp8(cases=[Case('tiny', 'torchao', 'rowwise')]"
    named = [f"{case}{more})\ndef test_{index}(fp8_pair):\n    {ask}\n" for index, (more, ask) in enumerate(tests)]
    pytester.makepyfile("\n".join(["import pytest\nfrom pytest_fp8 import Case\n", *named]))
    assert pytester.runpytest(*GATE).ret == 0
    assert list(dict.fromkeys(what for _, what, _ in requests if what in ("blocks", "layers"))) == order
    profiled = set()
    for process, operation, _ in requests:
        assert operation != "blocks" or process not in profiled
        profiled |= {process} if operation == "layers" else set()


def test_the_cases_that_are_gated_on_speed_share_the_sessions_false_alarms(suite, monkeypatch):
    asked = []
    place = "pytest_fp8.questions.speed.check.check_speedup"
    install(monkeypatch, H200)

    real = question.check_speedup
    monkeypatch.setattr(place, lambda *a, **k: asked.append(k["cases"]) or real(*a, **k))
    for chosen, cases in (("test_speedup", 2), ("test_layers or (test_speedup and rowwise)", 1)):
        asked.clear()
        suite.runpytest(*GATE, "-k", chosen)
        assert set(asked) == {cases}
    here = Case("1b", "torchao", "tensorwise")
    elsewhere = [Case("1b", "te", "mxfp8", seq=1024 + index) for index in range(19)]
    pairs = Pairs(Settings(gpu="h200"), Path(), Notes(), "", ExitStack())
    pairs.collected([(case, "speedup") for case in (here, *elsewhere)])
    assert pairs.gated_cases == 1, "cases that are skipped here share none"


# -- which tests run on which machine, and sessions in which nothing ran ----------------------------------------------

HEAD = "import pytest\nfrom pytest_fp8 import Case\n"
TINY = "Case('tiny', 'torchao', 'tensorwise'"
ONE = f"""
@pytest.mark.fp8(cases=[{TINY}, floor=0.5)])
def test_it(fp8_pair):
    fp8_pair.assert_layers()
"""
EMULATED = ONE.replace("floor=0.5", "emulated=True").replace("test_it", "test_emulated")
BARE = "\n@pytest.mark.fp8\ndef test_mine(fp8_pair): ...\n"
OTHER = "\ndef test_other(): pass\n"
MXFP8 = ONE.replace(f"{TINY}, floor=0.5)", "Case('tiny', 'transformer_engine', 'mxfp8')")
SKIPPED = "pytestmark = pytest.mark.skip(reason='not today')\n"
SKIPS = "@pytest.fixture(autouse=True)\ndef f():\n    pytest.skip('not today')\n"
NOT_RUN = "pytestmark = pytest.mark.xfail(reason='not today', run=False)\n"
TIMES = ONE.replace("fp8_pair.assert_layers()", "fp8_pair.timing_evidence(); pytest.skip('not today')")
NEVER_ASKS = ONE.replace("fp8_pair.assert_layers()", "pytest.xfail('not today')")
SET_UP_FAILS = "@pytest.fixture\ndef broken():\n    raise RuntimeError\n" + ONE.replace(
    "@pytest.mark.fp8", "@pytest.mark.xfail\n@pytest.mark.fp8"
).replace("(fp8_pair):", "(broken, fp8_pair):")
HOPPER, ADA = (ONE.replace("floor=0.5", f"chip='{chip}'").replace("test_it", chip) for chip in ("hopper", "ada"))
BY_CHIP = HOPPER.replace("def ", "def test_") + ADA.replace("def ", "def test_")
STRICT = ("--fp8-strict",)
NOTHING = "*no FP8 test ran on it: {}. A gate that ran nothing is not green*"
NONE_RAN = "FP8-R44: no FP8 test ran under --fp8-strict: not today. A gate that ran nothing*"
SESSIONS = {
    # name: (GPU, tests, options, outcomes, exit code, what is said)
    "declared, none here": (None, ONE, GATE, {"skipped": 1}, 1, "*--fp8-gpu=h200 was declared; no NVIDIA GPU*"),
    "declared, another here": (H100, ONE, GATE, {"skipped": 1}, 1, "*was declared; this is NVIDIA H100*"),
    "auto, none here": (None, ONE, ("-rs",), {"skipped": 1}, 0, "*needs a GPU with FP8 tensor cores*"),
    "auto, one without FP8": (A100, ONE, ("-rs",), {"skipped": 1}, 0, "*needs a GPU with FP8 tensor cores*"),
    "no test asks it": (H200, OTHER, GATE, {"passed": 1}, 1, "*no test of this run asks anything of a GPU*"),
    "a mark skips": (H200, SKIPPED + ONE, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "a fixture skips": (H200, SKIPS + ONE, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "expected to fail, not run": (H200, NOT_RUN + ONE, GATE, {"xfailed": 1}, 1, NOTHING.format("*not today")),
    "timed and skipped": (H200, TIMES, GATE, {"skipped": 1}, 1, NOTHING.format("not today")),
    "fails as expected in set-up": (H200, SET_UP_FAILS, GATE, {"xfailed": 1}, 1, NOTHING.format("expected to fail")),
    "fails as expected, asks nothing": (H200, NEVER_ASKS, GATE, {"xfailed": 1}, 1, NOTHING.format("not today")),
    "a recipe of another chip": (H200, MXFP8, GATE, {"errors": 1}, 1, "*recipe 'mxfp8' of * needs*10.0*"),
    "emulated beside a GPU": (H200, EMULATED, (), {"passed": 1}, 0, "*tiny-torchao-tensorwise-emulated*"),
    "emulated beside a test of it": (H200, EMULATED + ONE, ("-rs",), {"passed": 1, "skipped": 1}, 0, "* emulated: *"),
    "emulated, declared": (H200, EMULATED, (*GATE, "-rs"), {"skipped": 1}, 1, "*an emulated test asks nothing of it"),
    # The first mark that asks the GPU itself is another chip's.
    "marks of two chips": (L40S, BY_CHIP + EMULATED, ("-rs",), {"passed": 1, "skipped": 2}, 0, "* the NVIDIA L40S *"),
    "no chip in the mark": (B200, ONE, ("--fp8-gpu=b200",), {"passed": 1}, 0, "*tiny-torchao-tensorwise*"),
    "strict, nothing ran": (None, SKIPPED + EMULATED, STRICT, {"skipped": 1}, 1, NONE_RAN),
    "strict, no FP8 test": (None, OTHER, STRICT, {"passed": 1}, 0, "*1 passed*"),
    "without a GPU": (None, BARE, (), {"skipped": 1}, 0, "1 not run: needs a GPU with FP8 *; emulated=True in*"),
}


@pytest.mark.parametrize("name", SESSIONS)
def test_what_runs_and_whether_the_session_is_green(pytester, monkeypatch, name):
    gpu, tests, options, outcomes, code, says = SESSIONS[name]
    install(monkeypatch, gpu)
    pytester.makepyfile(HEAD + tests)
    result = pytester.runpytest(*options)
    result.assert_outcomes(**outcomes)
    assert result.ret == code
    result.stdout.fnmatch_lines([says])


@pytest.mark.parametrize("strict", [True, False])
def test_a_library_that_is_missing_fails_a_gate_and_skips_elsewhere(pytester, monkeypatch, strict):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.recipes.BackendFacts.available", lambda self: (False, f"{self.name} is missing"))
    pytester.makepyfile(HEAD + ONE)
    declared = pytester.runpytest(*GATE)
    declared.assert_outcomes(errors=1)
    declared.stdout.fnmatch_lines(["*torchao is missing*"])
    auto = pytester.runpytest(*STRICT * strict, "--fp8-report=out")
    auto.assert_outcomes(skipped=1)
    assert auto.ret == strict
    auto.stdout.fnmatch_lines(["*= FP8 =*", "1 not run: torchao is missing (*"])
    told = "FP8-R44: no FP8 test ran under --fp8-strict: torchao is missing. A gate that ran nothing*"
    (auto.stdout.fnmatch_lines if strict else auto.stdout.no_fnmatch_line)(told)
    assert (pytester.path / "out/summary.md").read_text().startswith("## FP8: nothing ran")


def test_strict_is_green_where_one_test_ran_and_another_s_library_is_missing(pytester, monkeypatch):
    install(monkeypatch, None)
    monkeypatch.setattr(markers, "_library", lambda case: "" if case.backend == "torchao" else "not installed")
    missing = EMULATED.replace("'torchao'", "'accelerate_torchao'").replace("test_emulated", "test_missing")
    pytester.makepyfile(HEAD + missing + EMULATED)
    assert pytester.runpytest(*STRICT).ret == 0


@pytest.mark.slow
def test_a_strict_gate_that_ran_nothing_is_red_under_xdist_too(pytester):
    pytester.makepyfile(HEAD + SKIPPED + EMULATED)
    result = pytester.runpytest_subprocess(*STRICT, "-n", "2", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines([NONE_RAN])


@pytest.mark.oldest
def test_a_run_that_was_interrupted_at_once_is_not_said_to_have_run_nothing(suite, monkeypatch, capsys):
    install(monkeypatch, H200)
    suite.makeconftest("def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n")
    done = suite.inline_run(*GATE, no_reraise_ctrlc=True)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    said = capsys.readouterr().out
    assert "KeyboardInterrupt" in said
    assert "ran nothing" not in said


# -- tests that ask nothing -------------------------------------------------------------------------------------------

TESTS = """
CASE = pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])

@CASE
def test_prints(fp8_pair): print(fp8_pair.case)
@CASE
def test_does_not_call(fp8_pair): fp8_pair.assert_loss
@pytest.mark.fp8(recipe="rowwise")
def test_marked(): pass

@CASE
def test_asserts(fp8_pair): fp8_pair.assert_loss()
@CASE
def test_has_an_arm(fp8_pair): assert fp8_pair.fp8
@CASE
def test_has_evidence(fp8_pair): assert fp8_pair.evidence(fp8_pair.loss_evidence)
@pytest.fixture
def asked(fp8_pair): fp8_pair.assert_loss()
@CASE
def test_by_a_fixture(asked): pass
@CASE
def test_breaks(fp8_pair): assert 1 == 2
"""
MARKED_WHOLE = "import pytest\npytestmark = pytest.mark.fp8(recipe='rowwise')\ndef test_mine(): pass"
SILENT = [
    "test_prints takes fp8_pair and asks nothing of it",
    "test_does_not_call takes fp8_pair and asks nothing of it",
    "test_marked has a mark fp8 that is not read",
]


@pytest.mark.parametrize("option", ["-v", "--fp8-strict", "--fp8-gpu=h200"])
def test_a_test_that_asks_nothing_is_warned_about_and_fails_a_gate(pytester, monkeypatch, option):
    """Whoever asks, has nothing to ask or fails anyway is left alone."""
    install(monkeypatch, H200)
    pytester.makepyfile(HEAD + TESTS, test_whole=MARKED_WHOLE)
    # Whatever filters of warnings other tests have left in this process.
    result = pytester.runpytest("-p", "no:benchmark", "-W", "always", "-k", "not breaks", option)
    said = r"(?:PytestWarning: |^)FP8-R\d\d: (test_\w+)(?:\[\S+\])? ((?:takes|has) .*[^.])\.?$"
    told = {" ".join(found) for found in re.findall(said, result.stdout.str(), re.M)}
    assert told == set(SILENT)
    assert (result.ret == pytest.ExitCode.TESTS_FAILED) is (option != "-v")
    result.stdout.fnmatch_lines(["*next:*fp8_pair*" if option == "-v" else "*next:*"])
    pytester.runpytest("-p", "no:benchmark", "-W", "always", "-k", "breaks", option).assert_outcomes(
        failed=1, warnings=0
    )


def test_what_a_test_only_looks_at_is_its_own_affair(pytester, monkeypatch):
    install(monkeypatch, H200, strangers=(4242,))
    pytester.makepyfile(
        HEAD
        + """
@pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
def test_it(fp8_pair):
    assert fp8_pair.faster().verdict.value == "INVALID"
"""
    )
    assert pytester.runpytest(*GATE).ret == 0


# -- fp8_check: a test of each question that a case answers, known from collection on --------------------------------

CHECK = """
CASES = [Case("tiny", "torchao", "rowwise"), Case("micro", "torchao", "rowwise", emulated=True)]

@pytest.mark.fp8(cases=CASES)
def test_fp8(fp8_check):
    fp8_check()
"""
EMULATED_ASKS = ("layers", "numerics", "loss", "checkpoints")


def test_each_question_that_a_case_answers_is_a_test_and_all_of_them_are_asked(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=1.2)
    pytester.makepyfile(HEAD + CHECK)
    collected = [line for line in pytester.runpytest("--co", "-q").outlines if "::" in line]
    expected = [f"tiny-torchao-rowwise-{each}" for each in (*EMULATED_ASKS, "faster", "speedup", "memory")]
    expected += [f"micro-torchao-rowwise-emulated-{each}" for each in EMULATED_ASKS]
    assert sorted(line.partition("[")[2].removesuffix("]") for line in collected) == sorted(expected)
    one = pytester.runpytest(*GATE, "-k", "loss", "-v")
    one.assert_outcomes(passed=1, skipped=1)
    one.stdout.fnmatch_lines(["*::test_fp8?tiny-torchao-rowwise-loss? PASSED*"])
    result = pytester.runpytest(*GATE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise *yes*"])


def test_a_test_that_does_not_call_it_asks_nothing(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(HEAD + CHECK.replace("fp8_check()", "fp8_check"))
    pytester.runpytest("-k", "tiny and layers", "-W", "always").stdout.fnmatch_lines(["*asks nothing of it*"])
