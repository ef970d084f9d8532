"""The whole plugin on a GPU that is not there: arms answer by hand, everything else is real."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import pytest_fp8.pair
from helpers.fakes import A100, B200, H100, H200, SUITE, FakeProcess, install
from pytest_fp8.errors import ArmError
from pytest_fp8.report.ledger import Ledger
from pytest_fp8.rules.speed import BASELINE_BLOCKS

CHECKPOINTS = """
    @pytest.mark.fp8(cases=CASES, question="checkpoints")
    def test_checkpoints(fp8_pair):
        fp8_pair.assert_checkpoints()
"""
UPDATE = ("--fp8-gpu=h200", "--fp8-update-baselines", "--fp8-reason=first")


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE + CHECKPOINTS)
    return pytester


def test_without_baselines_the_questions_pass_and_say_what_was_not_exercised(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise*2/3*1.[12]*x +-*none*", "*tiny-te-current*2/3*"])
    result.stdout.fnmatch_lines(["*8 passed, 4 not exercised*"])
    result.stdout.fnmatch_lines(["*no baseline for 2 case(s) on h200, so 4 question(s)*store them*promote*compare*"])
    assert result.ret == 0


def test_without_baselines_a_gate_in_ci_is_not_green(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(["*no baseline for 2 case(s) on h200*", "*8 passed, 4 not exercised*"])
    assert result.ret == 1
    assert suite.runpytest("--fp8-gpu=h200", "--fp8-undecided=warn").ret == 0


def test_strict_fails_what_was_not_exercised(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(passed=8, failed=4)
    result.stdout.fnmatch_lines(["*NOT_EXERCISED: no baseline to hold the speedup against*"])


def test_an_update_writes_and_a_second_run_passes_against_it(suite, monkeypatch):
    install(monkeypatch, H200)
    first = suite.runpytest(*UPDATE)
    assert first.ret == 0
    first.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    stored = json.loads((suite.path / "baselines/h200/tiny-te-current.json").read_text())
    assert stored["schema"] == 2
    [session] = stored["sessions"]
    assert session["reason"] == "first"
    assert len(session["metrics"]["speedup"]) == 4, "raw values of four fresh processes"
    assert len(session["metrics"]["speedup"][0]) == BASELINE_BLOCKS, "one per block, not a mean"
    second = suite.runpytest("--fp8-gpu=h200", "--fp8-strict")
    second.assert_outcomes(passed=12)
    second.stdout.fnmatch_lines(["*1.[12]*x +-0.0*1.[12]*x*0.90x*yes*"])


@pytest.mark.parametrize(
    ("change", "test", "says"),
    [
        ({"speedup": 1.1}, "test_speedup", "FP8 lost speed against BF16 since the baseline"),
        ({"fp8_memory": 120}, "test_memory", "FP8 takes more memory against BF16 than in the baseline"),
        ({"nan_at": 20}, "test_loss", "loss is not finite from step 20 on"),
        ({"executed_roles": ("fprop",)}, "test_layers", "converted but not executed in FP8: dgrad of 2 of 2 layers"),
        ({"recipe": {"recipe": "tensorwise"}}, "test_layers", "another recipe was in force than the one asked for"),
    ],
)
def test_what_changed_since_the_baseline_fails_its_own_test(suite, monkeypatch, change, test, says):
    install(monkeypatch, H200)
    assert suite.runpytest(*UPDATE).ret == 0
    install(monkeypatch, H200, **change)
    result = suite.runpytest("--fp8-gpu=h200", "-k", f"{test} and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.fnmatch_lines([f"*FAIL: *{says}*", "*expected:*", "*seen:*", "*next:*"])


def test_a_case_that_became_faster_passes_and_asks_for_a_new_baseline(suite, monkeypatch):
    install(monkeypatch, H200)
    assert suite.runpytest(*UPDATE).ret == 0
    install(monkeypatch, H200, speedup=1.3)
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-strict", "-k", "test_speedup and rowwise")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*IMPROVED: FP8 is faster than its baseline*", "*+8.[0-9]%*", "*update the baseline*"])
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


def test_slower_than_bf16_fails_the_floor(suite, monkeypatch):
    install(monkeypatch, H200, speedup=0.82)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_faster and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.fnmatch_lines(["*FP8 is not faster than the best BF16*", "*0.8*x +-*FAIL*none*"])


def test_a_checkpoint_that_arrives_changed_is_no_yes_in_the_table(suite, monkeypatch):
    install(monkeypatch, H200)
    real = FakeProcess.load
    monkeypatch.setattr(FakeProcess, "load", lambda *args, **more: {**real(*args, **more), "digests": {"w": 2}})
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_checkpoints and rowwise")
    result.assert_outcomes(failed=1, deselected=11)
    result.stdout.re_match_lines([r" *tiny-torchao-rowwise( +-)+ +FAIL$"])


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
            "1 of 1 questions have no answer on the declared GPU. *",
            f"  tiny-torchao-rowwise faster: INVALID: *{why}*",
            "*next: *--fp8-undecided=warn*",
            "*1 invalid*",
        ]
    )
    assert result.ret == 1
    warned = suite.runpytest("--fp8-gpu=h200", "--fp8-undecided=warn", "-k", "test_faster and rowwise")
    warned.stdout.fnmatch_lines(["1 of 1 questions have no answer*"])
    assert warned.ret == 0
    assert suite.runpytest("-k", "test_faster and rowwise").ret == 0, "no GPU was declared"
    assert suite.runpytest("--fp8-gpu=h200", "--fp8-strict", "-k", "test_faster and rowwise").ret == 1


def test_what_a_test_only_looks_at_is_its_own_affair(pytester, monkeypatch):
    install(monkeypatch, H200, strangers=(4242,))
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
        def test_it(fp8_pair):
            assert fp8_pair.faster().verdict.value == "INVALID"
        """
    )
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0


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
    install(monkeypatch, H200, fails={"tiny-te-current": "died"})
    result = suite.runpytest("--fp8-gpu=h200")
    outcome = result.parseoutcomes()
    assert outcome["errors"] == 6
    assert outcome["passed"] == 4, "the other case's questions, two of which have no baseline"
    result.stdout.fnmatch_lines(["*the arm 'tiny-te-current on cuda' failed*"])


@pytest.mark.parametrize(
    ("gpu", "says"), [(None, "no NVIDIA GPU"), (H100, "this is NVIDIA H100"), (A100, "this is NVIDIA A100")]
)
def test_a_declared_gpu_that_is_not_there_skips_and_fails_the_session(suite, monkeypatch, gpu, says):
    install(monkeypatch, gpu)
    result = suite.runpytest("--fp8-gpu=h200", "-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*--fp8-gpu=h200 was declared; {says}*", "*A gate that ran nothing is not green*"])


def test_a_declared_family_fits_any_of_its_gpus(suite, monkeypatch):
    install(monkeypatch, H100)
    assert suite.runpytest("--fp8-gpu=hopper").ret == 0


def test_a_declared_gpu_and_tests_that_ask_it_nothing_fail_the_session(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no test of this run asks anything of a GPU*"])


@pytest.mark.parametrize("gpu", [None, A100])
def test_auto_skips_with_the_reason_and_stays_green(suite, monkeypatch, gpu):
    install(monkeypatch, gpu)
    result = suite.runpytest("-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*needs a hopper GPU*"])


def test_a_case_for_another_chip_says_so(suite, monkeypatch):
    install(monkeypatch, B200)
    result = suite.runpytest("--fp8-gpu=b200", "-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*is for hopper; NVIDIA B200 is blackwell*"])


def test_a_missing_library_fails_on_a_declared_gpu_and_skips_otherwise(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.backends.base.Backend.available", lambda self: (False, f"{self.name} is missing"))
    declared = suite.runpytest("--fp8-gpu=h200")
    declared.assert_outcomes(errors=12)
    declared.stdout.fnmatch_lines(["*torchao is missing*"])
    auto = suite.runpytest("-rs")
    auto.assert_outcomes(skipped=12)
    auto.stdout.fnmatch_lines(["*torchao is missing*"])


def test_a_recipe_the_chip_cannot_do_fails_on_a_declared_gpu(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.fp8(model="tiny", backend="transformer_engine", recipe="mxfp8")
        def test_layers(fp8_pair): ...
        """
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*recipe 'mxfp8' of transformer_engine needs compute capability 10.0*9.0*"])


EMULATED = "@pytest.mark.fp8(model='tiny', emulated=True)\ndef test_emulated(fp8_pair): fp8_pair.assert_layers()\n"
ASKS_GPU = "@pytest.mark.fp8(model='tiny')\ndef test_on_it(fp8_pair): fp8_pair.assert_layers()\n"


def test_emulated_tests_run_on_a_machine_with_a_gpu_that_no_test_asks(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(f"import pytest\n{EMULATED}{ASKS_GPU}")
    alone = pytester.runpytest("-k", "not test_on_it")
    alone.assert_outcomes(passed=1, deselected=1)
    both = pytester.runpytest("-rs")
    both.assert_outcomes(passed=1, skipped=1)
    both.stdout.fnmatch_lines(["SKIP* emulated: other tests of this session ask the NVIDIA H200 itself"])
    declared = pytester.runpytest("-rs", "--fp8-gpu=h200", "-k", "not test_on_it")
    declared.assert_outcomes(skipped=1, deselected=1)
    assert declared.ret == 1
    declared.stdout.fnmatch_lines(["SKIP*--fp8-gpu=h200 was declared, and an emulated test asks nothing of it"])


def test_without_a_gpu_a_session_that_asked_nothing_says_why_and_how_to_go_on(pytester, monkeypatch):
    install(monkeypatch, None)
    pytester.makepyfile("import pytest\n@pytest.mark.fp8\ndef test_mine(fp8_pair): ...")
    result = pytester.runpytest()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["=* FP8 *=", "1 not run: needs a hopper GPU: no NVIDIA GPU (fake); emulated=True in*"])


@pytest.mark.slow
def test_under_xdist_the_controller_has_the_whole_table(suite, monkeypatch):
    pytest.importorskip("xdist")
    install(monkeypatch, None)
    result = suite.runpytest("-n2", "--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*12 not run: --fp8-gpu=h200 was declared*"])


def test_a_failure_that_a_library_s_defect_explains_is_shown_as_known(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.xfail(strict=True, reason="somelib 1.2: leaves its backward in BF16")
        @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="layers")
        def test_layers(fp8_pair):
            fp8_pair.assert_layers()
        """
    )
    install(monkeypatch, H200, executed_roles=("fprop",))
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(xfailed=1)
    note = "[[]1] fails as known: somelib 1.2: leaves its backward in BF16"
    result.stdout.fnmatch_lines([" tiny-torchao-rowwise [[]1] *FAIL*", note])


@pytest.fixture
def requests(monkeypatch):
    """What the arms are asked, in order: (process, operation)."""
    noted = []
    real = FakeProcess.request

    def request(self, operation, *rest, **more):
        noted.append((self.pid, operation))
        return real(self, operation, *rest, **more)

    monkeypatch.setattr(FakeProcess, "request", request)
    return noted


@pytest.mark.parametrize(
    ("asked", "order"),
    [("test_layers and rowwise", ["layers"]), ("(test_layers or test_faster) and rowwise", ["blocks", "layers"])],
)
def test_speed_is_measured_before_presence_and_only_where_a_test_will_ask_for_it(
    suite, monkeypatch, requests, asked, order
):
    install(monkeypatch, H200)
    assert suite.runpytest("--fp8-gpu=h200", "-k", asked).ret == 0
    assert [what for what in dict.fromkeys(what for _, what in requests) if what in ("blocks", "layers")] == order


ONE_TEST = """
    import pytest

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise"{more})
    def test_both(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_speedup()
"""


def test_a_test_that_names_no_question_may_ask_for_speed_and_is_timed_first(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE_TEST.format(more=""))
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    assert [what for what in dict.fromkeys(what for _, what in requests) if what in ("blocks", "layers")] == [
        "blocks",
        "layers",
    ]


def test_speed_that_was_not_announced_is_measured_in_processes_that_nobody_profiled(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE_TEST.format(more=", question='layers'"))
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    profiled = set()
    for process, operation in requests:
        assert operation != "blocks" or process not in profiled
        profiled |= {process} if operation == "layers" else set()
    assert profiled


def test_a_question_on_the_class_counts_for_its_methods(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.fp8(question="layers")
        class TestIt:
            @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
            def test_layers(self, fp8_pair):
                fp8_pair.assert_layers()
        """
    )
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    assert "blocks" not in {what for _, what in requests}


# -- the suite's own floor --------------------------------------------------------------------------------------------

KNOWN_SLOWER = """
    import sys
    sys.path.insert(0, {suites!r})
    import pytest
    from floor import assert_faster

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="speedup", slower_because="narrow")
    def test_faster(request, fp8_pair):
        assert_faster(request, fp8_pair)
"""


STORED_TOO = """
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="speedup", slower_because="narrow")
    def test_speedup(fp8_pair):
        fp8_pair.assert_speedup()

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", question="layers", slower_because="narrow")
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""


@pytest.mark.parametrize(
    ("world", "strict", "outcome", "says"),
    [
        ({"speedup": 0.8}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 1.2}, (), {"failed": 1}, "XPASS(strict)] narrow"),
        # Within the noise of one pair of processes, and below the floor with more of them.
        ({"speedup": 0.991}, (), {"xfailed": 1}, "fails as known: narrow"),
        ({"speedup": 0.8, "strangers": (4242,)}, (), {}, "1 invalid"),
        ({"strangers": (4242,)}, (), {}, "1 invalid"),
        ({"strangers": (4242,)}, ("--fp8-strict",), {"failed": 1}, "another process used the GPU"),
        ({"fails": {"tiny-torchao-rowwise": "out of memory"}}, (), {"failed": 1}, "tiny-torchao-rowwise"),
        ({"fails_blocks": True}, (), {"failed": 1}, "blocks went wrong"),
    ],
)
def test_what_is_known_to_be_slower_fails_for_that_alone(pytester, monkeypatch, world, strict, outcome, says):
    if world.pop("fails_blocks", False):

        def blocks(self, **_):
            raise ArmError("died", "blocks went wrong")

        monkeypatch.setattr(FakeProcess, "blocks", blocks)
    install(monkeypatch, H200, **world)
    pytester.makepyfile(KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites")))
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report-dir=out", *strict)
    result.assert_outcomes(**outcome)
    summary = (pytester.path / "out" / "summary.md").read_text()
    assert ("fails as known: faster" in summary) is ("xfailed" in outcome)
    assert "no FP8 test ran" not in result.stdout.str()
    result.stdout.fnmatch_lines([f"*{says.replace('[', '?').replace(']', '?')}*"])


def test_what_is_known_and_stored_to_be_slower_is_not_proved_by_a_second_pair(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=0.8)
    suite = KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites"))
    pytester.makepyfile(suite + STORED_TOO)
    pytester.runpytest(*UPDATE).assert_outcomes(passed=2, xfailed=1)
    for strangers, outcome, pairs in (((), {"passed": 1, "xfailed": 1}, 1), ((4242,), {}, 1)):
        world = install(monkeypatch, H200, speedup=0.8, strangers=strangers)
        result = pytester.runpytest("--fp8-gpu=h200", "-k", "not layers", "--fp8-report-dir=out")
        result.assert_outcomes(**outcome)
        assert world.built.count("tiny-torchao-rowwise") == pairs
        summary = (pytester.path / "out" / "summary.md").read_text()
        assert ("fails as known: faster" in summary) is (not strangers), "a disturbed measurement shows nothing"


def test_what_is_known_to_be_slower_is_counted_so_where_nothing_else_was_asked(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=0.8)
    suite = KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites"))
    pytester.makepyfile(suite + STORED_TOO)
    pytester.runpytest(*UPDATE).assert_outcomes(passed=2, xfailed=1)
    pytester.runpytest("--fp8-gpu=h200", "-k", "faster", "--fp8-report-dir=out").assert_outcomes(xfailed=1)
    assert "## FP8: 1 FAIL as known" in (pytester.path / "out" / "summary.md").read_text()
    real = pytester.runpytest("--fp8-gpu=h200", "-k", "faster", "--runxfail")
    real.assert_outcomes(failed=1)
    real.stdout.fnmatch_lines(["*FP8 is not faster than the best BF16*"])


@pytest.mark.parametrize(("kernels", "outcome"), [(1.2, "xfailed"), (0.9, "failed")])
def test_the_suite_expects_a_slow_host_to_miss_the_floor_and_nothing_else(pytester, monkeypatch, kernels, outcome):
    """A gate run: its first look is one pair of processes, which proves nothing, while busy times would pass."""
    install(monkeypatch, H200, speedup=0.8, busy=60.0, kernels=kernels, kernels_alone=True)
    suite = KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites"))
    pytester.makepyfile(suite.replace(', slower_because="narrow"', ""))
    result = pytester.runpytest("--fp8-gpu=h200", "-rx", "--fp8-report-dir=out")
    result.assert_outcomes(**{outcome: 1})
    known = "fails as known: faster" in (pytester.path / "out" / "summary.md").read_text()
    assert known is (outcome == "xfailed")
    slow_host = "*this machine's host is too slow for it: launch-bound: the GPU works [45]?.? ms of each 12* ms step*"
    result.stdout.fnmatch_lines([slow_host] if outcome == "xfailed" else ["*FP8 is not faster than the best BF16*"])


def test_the_suite_reports_an_arm_that_dies_while_it_is_timed(pytester, monkeypatch):
    def blocks(self, **_):
        raise ArmError("died", "blocks went wrong")

    install(monkeypatch, H200)
    monkeypatch.setattr(FakeProcess, "blocks", blocks)
    suite = KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites"))
    pytester.makepyfile(suite.replace(', slower_because="narrow"', ""))
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*[[]1[]] blocks went wrong*"])


def test_what_an_h200_showed_is_not_asked_of_another_gpu(pytester, monkeypatch):
    h100 = replace(H200, name="NVIDIA H100 80GB HBM3", memory=80 * 2**30)
    install(monkeypatch, h100, speedup=1.2)
    pytester.makepyfile(KNOWN_SLOWER.format(suites=str(Path(__file__).parent.parent / "suites")))
    pytester.runpytest("--fp8-gpu=h100").assert_outcomes(xpassed=1)


SKIPPERS = {
    "a mark": "import pytest\npytestmark = pytest.mark.skip(reason='not today')\n",
    "a fixture": "import pytest\n@pytest.fixture(autouse=True)\ndef f():\n    pytest.skip('not today')\n",
    "no run": "import pytest\npytestmark = pytest.mark.xfail(reason='not today', run=False)\n",
}


@pytest.mark.parametrize("skipper", SKIPPERS)
def test_a_gate_whose_tests_somebody_else_skipped_is_not_green(pytester, monkeypatch, skipper):
    install(monkeypatch, H200)
    pytester.makepyfile(SKIPPERS[skipper] + textwrap.dedent(SUITE))
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no FP8 test ran on it: *not today. A gate that ran nothing is not green*"])


TIMES_AND_SKIPS = """
    import pytest

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise", floor=0.5)
    def test_it(fp8_pair):
        fp8_pair.timing_evidence()
        pytest.skip("not today")
"""


def test_a_test_that_timed_its_arms_and_then_skipped_answered_nothing(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(TIMES_AND_SKIPS)
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no FP8 test ran on it: not today. A gate that ran nothing is not green*"])


def test_a_run_that_was_interrupted_at_once_is_not_said_to_have_run_nothing(pytester, monkeypatch, capsys):
    install(monkeypatch, H200)
    pytester.makeconftest("def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n")
    pytester.makepyfile(SUITE)
    done = pytester.inline_run("--fp8-gpu=h200", no_reraise_ctrlc=True)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    said = capsys.readouterr().out
    assert "KeyboardInterrupt" in said
    assert "ran nothing" not in said


def test_steps_below_the_floor_take_a_further_pair_though_busy_times_pass(pytester, monkeypatch):
    world = install(monkeypatch, H200, speedup=0.8, busy=60.0, kernels=1.2, kernels_alone=True)
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("--fp8-gpu=h200", "-k", "test_faster and rowwise")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*FP8 is not faster than the best BF16*", "*2 process(es)*", "*launch-bound*1.20x*"])
    assert world.built.count("tiny-torchao-rowwise") == 2


SET_UP_FAILS = """
    @pytest.fixture
    def broken():
        raise RuntimeError("no network")

    @pytest.mark.xfail
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
    def test_it(broken, fp8_pair):
        fp8_pair.assert_layers()
"""
NEVER_ASKS = """
    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="rowwise")
    def test_it(fp8_pair):
        pytest.xfail("not today")
"""


@pytest.mark.parametrize(("test", "says"), [(SET_UP_FAILS, "expected to fail"), (NEVER_ASKS, "not today")])
def test_a_test_that_is_expected_to_fail_ran_where_it_asked_something(pytester, monkeypatch, test, says):
    install(monkeypatch, H200)
    pytester.makepyfile("import pytest\n" + textwrap.dedent(test))
    result = pytester.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines([f"*no FP8 test ran on it: {says}. A gate that ran nothing is not green*"])


def test_pytest_exit_before_the_first_test_is_no_green_gate(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makeconftest("import pytest\ndef pytest_runtest_setup(item):\n    pytest.exit('no', returncode=0)\n")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_subprocess("--fp8-gpu=h200", "-p", "no:cacheprovider")
    assert result.ret == 1


def test_what_could_not_be_asked_for_want_of_a_library_did_not_run():
    ledger = Ledger()
    ledger.skipped("test_a", "torchao is not installed")
    ledger.ended("a case", "test_a", SimpleNamespace(skipped=False, failed=True, when="setup"))
    assert ledger.ran_on_gpu == 0
    ledger.ended("a case", "test_b", SimpleNamespace(skipped=True, failed=False, when="call", longrepr="out of memory"))
    assert ledger.not_run == {"torchao is not installed": ["test_a"], "out of memory": ["test_b"]}
