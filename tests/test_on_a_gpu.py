"""The whole plugin on a GPU that is not there: arms answer by hand, everything else is real."""

from __future__ import annotations

import json

import pytest

import pytest_fp8.pair
from helpers.fakes import H200, SUITE, FakeProcess, install
from helpers.sessions import CHECKPOINTS, UPDATE
from pytest_fp8.codes import C, L, M, R, S
from pytest_fp8.stats.looks import BASELINE_BLOCKS


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE + CHECKPOINTS)
    return pytester


def test_without_baselines_the_questions_pass_and_say_what_was_not_exercised(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise*2/3*1.[12]*x (none)*", "*tiny-te-current*2/3*"])
    result.stdout.fnmatch_lines(["*8 passed, 4 not exercised*"])
    result.stdout.fnmatch_lines(["*no baseline for 2 case(s) on h200, so 4 question(s)*store them*compare*"])
    assert result.ret == 0


def test_without_baselines_a_gate_in_ci_is_not_green(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(["*no baseline for 2 case(s) on h200*", "*8 passed, 4 not exercised*"])
    assert result.ret == 1


@pytest.mark.oldest
def test_strict_fails_what_was_not_exercised(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(passed=8, failed=4)
    result.stdout.fnmatch_lines(["*NOT_EXERCISED FP8-S01: no baseline to hold the speedup against*"])


@pytest.mark.oldest
def test_an_update_writes_and_a_second_run_passes_against_it(suite, monkeypatch):
    install(monkeypatch, H200)
    first = suite.runpytest(*UPDATE)
    assert first.ret == 0
    first.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    stored = json.loads((suite.path / "baselines/h200/tiny-te-current.json").read_text())
    assert stored["schema"] == 3
    [session] = stored["sessions"]
    assert session["reason"] == "first"
    assert len(session["metrics"]["speedup"]) == 4, "raw values of four fresh processes"
    assert len(session["metrics"]["speedup"][0]) == BASELINE_BLOCKS, "one per block, not a mean"
    second = suite.runpytest("--fp8-gpu=h200", "--fp8-strict")
    second.assert_outcomes(passed=12)
    second.stdout.fnmatch_lines(["*1.[12]*x (1.[12]*)*0.90x*yes*"])


@pytest.mark.parametrize(
    ("change", "test", "says"),
    [
        ({"speedup": 1.1}, "test_speedup", f"{S.SLOWER_THAN_BASELINE}: "),
        ({"fp8_memory": 120}, "test_memory", f"{M.MORE_MEMORY}: "),
        ({"nan_at": 20}, "test_loss", f"{C.NOT_FINITE}: *from step 20 on"),
        ({"executed_roles": ("fprop",)}, "test_layers", f"{L.DGRAD_NOT_IN_FP8}: *2 of 2 layers"),
        ({"recipe": {"recipe": "tensorwise"}}, "test_layers", f"{L.OTHER_RECIPE}: "),
    ],
)
def test_what_changed_since_the_baseline_fails_its_own_test(suite, monkeypatch, change, test, says):
    install(monkeypatch, H200)
    assert suite.runpytest(*UPDATE).ret == 0
    install(monkeypatch, H200, **change)
    result = suite.runpytest("--fp8-gpu=h200", "-k", f"{test} and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.fnmatch_lines([f"*FAIL {says}*", "*expected:*", "*seen:*", "*next:*"])


def test_a_case_that_became_faster_passes_and_asks_for_a_new_baseline(suite, monkeypatch):
    install(monkeypatch, H200)
    assert suite.runpytest(*UPDATE).ret == 0
    install(monkeypatch, H200, speedup=1.3)
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-strict", "-k", "test_speedup and rowwise")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*IMPROVED FP8-S02: FP8 is faster than its baseline*", "*+8.[0-9]%*", "*--fp8-update*"]
    )
    result.stdout.fnmatch_lines(["*1 improved*"])


def test_the_cases_that_are_gated_on_speed_share_the_sessions_false_alarms(suite, monkeypatch):
    asked = []
    install(monkeypatch, H200)
    real = pytest_fp8.questions.speed.question.check_speedup
    monkeypatch.setattr(
        "pytest_fp8.questions.speed.question.check_speedup", lambda *a, **k: asked.append(k["cases"]) or real(*a, **k)
    )
    suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup")
    assert set(asked) == {2}
    for chosen in ("test_speedup and rowwise", "test_layers or (test_speedup and rowwise)"):
        asked.clear()
        suite.runpytest("--fp8-gpu=h200", "-k", chosen)
        assert set(asked) == {1}


def test_a_baseline_too_coarse_for_its_tolerance_is_refused_and_says_what_it_could_hold(suite, monkeypatch):
    install(monkeypatch, H200)
    spread = iter([1.2, 1.2, 1.26, 1.26, 1.15, 1.15, 1.31, 1.31] * 2)
    real = FakeProcess.start_build

    def build(self, spec):
        real(self, spec)
        self.world.speedup = next(spread, 1.2)

    monkeypatch.setattr(FakeProcess, "start_build", build)
    result = suite.runpytest(*UPDATE, "-k", "(test_speedup or test_layers) and rowwise")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*not updated: its processes spread too much to gate at 2.0%; they could hold *%*"])


def test_a_checkpoint_that_arrives_changed_is_no_yes_in_the_table(suite, monkeypatch):
    install(monkeypatch, H200)
    real = FakeProcess.load
    monkeypatch.setattr(FakeProcess, "load", lambda *args, **more: {**real(*args, **more), "digests": {"w": 2}})
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_checkpoints and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.re_match_lines([r" *tiny-torchao-rowwise +FAIL$"])


@pytest.mark.parametrize(
    ("change", "why"),
    [({"strangers": (4242,)}, "another process used the GPU"), ({"attention": "fmha"}, "different attention kernels")],
)
def test_a_disturbed_measurement_is_invalid_and_fails_the_session(suite, monkeypatch, change, why):
    install(monkeypatch, H200, **change)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_faster and rowwise")
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
    assert suite.runpytest("-k", "test_faster and rowwise").ret == 0, "no GPU was declared"
    assert suite.runpytest("--fp8-gpu=h200", "--fp8-strict", "-k", "test_faster and rowwise").ret == 1


def test_what_a_test_only_looks_at_is_its_own_affair(pytester, monkeypatch):
    install(monkeypatch, H200, strangers=(4242,))
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case
        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
        def test_it(fp8_pair):
            assert fp8_pair.faster().verdict.value == "INVALID"
        """
    )
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0


@pytest.mark.oldest
def test_junit_has_each_tests_case_and_verdict(suite, monkeypatch):
    install(monkeypatch, H200, strangers=(4242,))
    suite.runpytest("--fp8-gpu=h200", "--junitxml=out.xml", "-k", "test_faster and rowwise")
    text = (suite.path / "out.xml").read_text()
    assert '<property name="fp8_verdict" value="INVALID"' in text
    assert '<property name="fp8_case" value="tiny-torchao-rowwise"' in text


def test_an_update_is_refused_where_fp8_was_not_shown_to_run(suite, monkeypatch):
    install(monkeypatch, H200, executed_roles=("fprop",))
    result = suite.runpytest(*UPDATE)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*baseline of tiny-torchao-rowwise was not updated: FP8 was not shown to run*"])
    assert not list((suite.path / "baselines").rglob("*.json"))


def test_an_update_without_the_presence_question_is_refused(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest(*UPDATE, "-k", "test_memory")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*the layers question was not asked in this run: select that test, too)"])


def test_a_pair_is_built_once_for_all_its_questions_and_nothing_stays(suite, monkeypatch):
    world = install(monkeypatch, H200)
    suite.runpytest("--fp8-gpu=h200")
    assert sorted(world.built) == ["tiny-bf16", "tiny-te-current", "tiny-torchao-rowwise"]
    assert world.closed >= len(world.built)


def test_an_arm_that_fails_ahead_of_its_turn_fails_its_own_tests_alone(suite, monkeypatch):
    install(monkeypatch, H200, fails={"tiny-te-current": R.ARM_DIED})
    result = suite.runpytest("--fp8-gpu=h200")
    outcome = result.parseoutcomes()
    assert outcome["errors"] == 6
    assert outcome["passed"] == 4, "the other case's questions, two of which have no baseline"
    result.stdout.fnmatch_lines(["*the arm 'tiny-te-current on cuda' failed*"])


def test_a_failure_that_a_library_s_defect_explains_is_shown_as_known(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.xfail(strict=True, reason="somelib 1.2: leaves its backward in BF16")
        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")], question="layers")
        def test_layers(fp8_pair):
            fp8_pair.assert_layers()
        """
    )
    install(monkeypatch, H200, executed_roles=("fprop",))
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(xfailed=1)
    note = "[[]1] fails as known: somelib 1.2: leaves its backward in BF16"
    result.stdout.fnmatch_lines([" tiny-torchao-rowwise [[]1] *FAIL*", note])
