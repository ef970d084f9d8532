"""--fp8-update: what is stored, what is refused and left to the byte; baselines that a session does not find; and runs
of a part, cut short or of chosen tests alone."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from helpers.fakes import H200, SUITE, install, update
from pytest_fp8.baselines.provenance import ci_variable
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.codes import R

SPEED = ("-k", "(test_speedup or test_layers) and rowwise")
GATE = ("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
FILE = "baselines/h200/tiny-torchao-rowwise.json"


def sessions(suite):
    """The stored sessions, the oldest first."""
    return json.loads((suite.path / FILE).read_text())["sessions"]


def committed(suite):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        assert suite.run(*git, *arguments).ret == 0


# -- stored -------------------------------------------------------------------------------------------------------


def test_a_first_session_is_new_and_a_second_joins_it(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest(*update())
    result.stdout.fnmatch_lines(["baseline h200/tiny-torchao-rowwise is new (no earlier baseline): *speedup 1.[12]*x"])
    [before] = sessions(suite)
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    result = suite.runpytest(*update("another reason, another day"))
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["baseline h200/tiny-torchao-rowwise: nothing moved by more than noise; this session joins the others"]
    )
    first, second = sessions(suite)
    assert first == before
    assert (second["reason"], second["starts"], second["commit"]) == ("another reason, another day", [], "0123456789ab")
    assert first["run"] != second["run"]


def test_a_speedup_that_moved_begins_a_level_and_is_shown_old_to_new(stored, monkeypatch):
    [before] = sessions(stored)
    committed(stored)
    install(monkeypatch, H200, speedup=1.1)
    result = stored.runpytest(*update("the new kernel"))
    result.stdout.fnmatch_lines(
        [
            "baseline h200/tiny-torchao-rowwise, old -> new:",
            "*fp8_share *-> *same",
            "*speedup *1.[12]*x *-> *1.[01]*x *-8.*% [[]-*%, -*%] *worse",
            "*a new level begins, and earlier sessions are not gated on: *speedup*",
            "wrote baselines/h200/tiny-torchao-rowwise.json",
        ]
    )
    [changed] = stored.path.glob("test_*.py")
    changed.write_text(changed.read_text() + "\n")
    stored.runpytest(*update("memory alone", "-k", "layers or memory"))
    first, second, third = sessions(stored)
    assert first == before, "what is stored never changes"
    assert set(second["starts"]) == {"speedup", "bf16_ms", "fp8_ms"}, "timed together"
    assert (second["dirty"], third["dirty"]) == (False, True), "baselines that an update wrote are no changed code"
    assert {*third["metrics"]} >= {"fp8_share", "memory_ratio"}
    assert not {"loss_gap", "speedup", "fp8_ms"} & {*third["metrics"]}, "only what it measured"
    stored.runpytest(*GATE).assert_outcomes(passed=1, deselected=9)


def test_busy_time_is_stored_and_gated_on_where_the_host_makes_step_times_scatter(suite, monkeypatch):
    # Step times alone would be refused: their processes spread too much.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8)
    assert suite.runpytest(*update(), *SPEED).ret == 0
    assert len(load_baseline(suite.path / FILE).values("busy_speedup")) == 4
    # A host that holds nothing up changes nothing: the case is gated on busy time from then on.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True)
    quiet = suite.runpytest(*GATE, "--fp8-report=report")
    quiet.assert_outcomes(passed=1, deselected=9)
    report = json.loads((suite.path / "report" / "report.json").read_text())
    assert report["entries"]["tiny-torchao-rowwise"]["decisions"]["speedup"]["numbers"]["on_busy"]
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8, speedup=1.1)
    slower = suite.runpytest(*GATE)
    slower.assert_outcomes(failed=1, deselected=9)
    slower.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*", "*of busy time*"])


def test_step_times_alone_of_a_host_bound_session_blame_no_fp8(suite, monkeypatch):
    install(monkeypatch, H200, busy=30.0)
    suite.runpytest(*update())
    install(monkeypatch, H200, busy=30.0, speedup=1.0)
    result = suite.runpytest(*GATE)
    assert result.ret == 1, "not answered on a declared GPU"
    result.assert_outcomes(deselected=9)
    result.stdout.fnmatch_lines(["*INVALID*the host held up steps, and the baseline has step times alone*"])


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "only", "why"),
    [
        ({"strangers": (4242,)}, "(layers or speedup)", "the timing is invalid (another process used the GPU)"),
        ({"nan_at": 20}, "tiny", "the loss question failed"),
        ({"executed_roles": ("fprop",)}, "tiny", "FP8 was not shown to run"),
    ],
)
def test_a_session_that_went_wrong_leaves_the_stored_file(stored, monkeypatch, world, only, why):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, speedup=1.4, **world)
    result = stored.runpytest(*update("again", "-k", f"{only} and rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*was not updated: {why}*"])
    assert (stored.path / FILE).read_bytes() == before


def test_a_history_that_cannot_be_read_is_not_written_over(stored):
    file = stored.path / FILE
    file.write_text(file.read_text()[:-100])
    before = file.read_text()
    result = stored.runpytest(*update("again"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json is not a readable baseline*", "*git*"])
    assert file.read_text() == before


def test_an_update_that_stores_nothing_fails_and_says_why(stored, monkeypatch):
    install(monkeypatch, None)
    result = stored.runpytest("--fp8-update=none")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*nothing was stored: needs a GPU with FP8 tensor cores: no NVIDIA GPU (fake)*"])


# -- missing, of no case, taken another way -----------------------------------------------------------------------


def test_a_variable_that_says_no_is_not_ci():
    assert [ci_variable({"CI": value}) for value in ("", "0", "false", "False", "no")] == [""] * 5


def test_orphaned_and_unexercised_baselines_are_named_after_a_whole_run(stored, monkeypatch):
    shutil.copy(stored.path / FILE, stored.path / "baselines/h200/tiny-torchao-gone.json")
    install(monkeypatch, H200, fails={"tiny-te-current": R.ARM_DIED})
    result = stored.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(
        [
            "1 orphaned baseline(s), of no case of this suite: tiny-torchao-gone",
            "1 unexercised baseline(s), asked nothing in this run: tiny-te-current",
        ]
    )
    install(monkeypatch, H200)
    assert stored.runpytest("--fp8-gpu=h200").ret == 0
    monkeypatch.setenv("CI", "true")
    assert stored.runpytest("--fp8-gpu=h200").ret == 1, "nobody reads notes there"


# -- with --fp8-base the change under test does not bring its own --------------------------------------------------


def test_a_pull_request_does_not_bring_its_own_baselines(stored, monkeypatch):
    committed(stored)
    install(monkeypatch, H200, speedup=1.1)
    for file in (stored.path / "baselines/h200").glob("*.json"):
        file.unlink()
    assert stored.runpytest(*update("mine")).ret == 0
    stored.runpytest(*GATE).assert_outcomes(passed=1, deselected=9)
    result = stored.runpytest(*GATE, "--fp8-base=main")
    result.assert_outcomes(failed=1, deselected=9)
    result.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*", "*; stored baselines: its own"])


def test_a_case_that_base_has_no_baseline_of_is_said_to_have_none_there(stored):
    kept = (stored.path / FILE).read_bytes()
    (stored.path / FILE).unlink()
    committed(stored)
    (stored.path / FILE).write_bytes(kept)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-base=main")
    result.stdout.fnmatch_lines(["*no baseline for 1 case(s) on h200 at base main, so * question(s) *"])


def test_where_base_has_none_at_all_those_of_the_checkout_are_read(suite, monkeypatch):
    install(monkeypatch, H200)
    committed(suite)
    assert suite.runpytest(*update()).ret == 0
    result = suite.runpytest("--fp8-gpu=h200", "--fp8-base=main")
    result.stdout.fnmatch_lines(["*; stored baselines: those in baselines, since it has none there"])
    result.stdout.no_fnmatch_line("*no baseline for*")


# -- runs of a part --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("-k", "layers"), ("test_orphan.py",), ("--maxfail=1",)])
def test_a_run_of_a_part_names_no_orphans(stored, monkeypatch, arguments):
    (stored.path / "baselines/h200/tiny-torchao-gone.json").write_text((stored.path / FILE).read_text())
    stored.makepyfile(test_orphan=SUITE)
    install(monkeypatch, H200, nan_at=3)
    result = stored.runpytest("--fp8-gpu=h200", *arguments)
    result.stdout.no_fnmatch_line("*orphaned*")


CUT_SHORT = """
    @pytest.fixture(autouse=True)
    def cut_short(request):
        if request.node.name == "test_loss[tiny-te-current]":
            {how}
"""


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize(
    "how", ["raise KeyboardInterrupt", "pytest.fail('first of all')", "pytest.exit('enough', returncode=3)"]
)
@pytest.mark.parametrize("marked", [True, False], ids=["questions", "no questions"])
def test_a_case_that_an_interrupted_run_half_asked_is_not_stored(pytester, monkeypatch, capfd, how, marked):
    install(monkeypatch, H200)
    tests = SUITE if marked else re.sub(', question="[a-z]+"', "", SUITE)
    assert ("question" in tests) is marked
    pytester.makepyfile(tests + CUT_SHORT.format(how=how))
    pytester.inline_run(*update(), "-x", no_reraise_ctrlc=True)
    assert [path.stem for path in (pytester.path / "baselines/h200").glob("*.json")] == ["tiny-torchao-rowwise"]
    if "exit" not in how:
        # pytest itself writes no summary after pytest.exit with a status of its own.
        assert "tiny-te-current was not updated: the run was cut short" in capfd.readouterr().out


def test_skipped_tests_and_failures_elsewhere_do_not_cut_a_case_short(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        SUITE
        + """
    @pytest.mark.skip(reason="not today")
    @pytest.mark.fp8(cases=CASES, question="checkpoints")
    def test_checkpoints(fp8_pair): ...

    def test_something_else():
        assert False

    def test_never_reached(): ...
    """
    )
    pytester.runpytest(*update(), "-x")
    assert len(list((pytester.path / "baselines/h200").glob("*.json"))) == 2
