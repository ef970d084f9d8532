"""--fp8-update-baselines: who may, when not, what is rewritten and what is left to the byte."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from helpers.baselines import edit
from helpers.fakes import H200, SUITE, install
from pytest_fp8.baselines.atomic import updating
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.baselines.update import too_few
from pytest_fp8.ci import CI_VARIABLES, ci_variable
from pytest_fp8.errors import BaselineError
from pytest_fp8.options import LEAST_PROCESSES
from pytest_fp8.report.ledger import Entry, Ledger
from pytest_fp8.rules.change import RUNS_TO_FAIL

FILE = "baselines/h200/tiny-torchao-rowwise.json"
CANDIDATE = "out/candidates/h200/tiny-torchao-rowwise.json"


def update(reason="first", *more):
    return ("--fp8-gpu=h200", "--fp8-update-baselines", f"--fp8-reason={reason}", *more)


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    install(monkeypatch, H200)
    assert suite.runpytest(*update()).ret == 0
    return suite


def sessions(suite, file=FILE):
    """The stored sessions, the oldest first."""
    return json.loads((suite.path / file).read_text())["sessions"]


# -- who may ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", CI_VARIABLES)
def test_ci_may_not_update(suite, monkeypatch, variable):
    install(monkeypatch, H200)
    monkeypatch.setenv(variable, "true")
    result = suite.runpytest(*update())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*refused in continuous integration*", f"*seen: *{variable}=true*", "*--fp8-update-in-ci*"]
    )
    assert not (suite.path / "baselines").exists()


def test_a_ci_job_that_is_there_to_update_may(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setenv("CI", "1")
    assert suite.runpytest(*update("nightly", "--fp8-update-in-ci")).ret == 0
    monkeypatch.setenv("PYTEST_FP8_UPDATE_IN_CI", "1")
    assert suite.runpytest(*update("nightly")).ret == 0


def test_a_plain_run_in_ci_fails_where_nothing_is_stored(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["no baseline for 2 case(s) on h200, so 4 question(s) compared with nothing; next: *"])


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no"])
def test_a_variable_that_says_no_is_not_ci(value):
    assert ci_variable({"CI": value}) == ""


# -- when not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["layers or speedup", "layers or faster"])
def test_a_shared_gpu_is_no_place_to_measure_a_baseline(stored, monkeypatch, test):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, strangers=(4242,), speedup=1.4)
    result = stored.runpytest(*update("again", "-k", f"({test}) and rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*was not updated: the timing is invalid (another process used the GPU)*"])
    assert (stored.path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [({"nan_at": 20}, "the loss question failed"), ({"executed_roles": ("fprop",)}, "FP8 was not shown to run")],
)
def test_a_failing_question_leaves_the_stored_file(stored, monkeypatch, change, why):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, speedup=1.4, **change)
    result = stored.runpytest(*update("again", "-k", "rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*was not updated: {why}*"])
    assert (stored.path / FILE).read_bytes() == before


# -- what is rewritten --------------------------------------------------------------------------------------------


def test_a_first_baseline_is_called_new(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest(*update())
    result.stdout.fnmatch_lines(["baseline h200/tiny-torchao-rowwise is new (no earlier baseline): *speedup 1.[12]*x"])


def test_where_nothing_moved_the_session_joins_the_others(stored):
    [before] = sessions(stored)
    result = stored.runpytest(*update("another reason, another day"))
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["baseline h200/tiny-torchao-rowwise: nothing moved by more than noise; this session joins the others"]
    )
    first, second = sessions(stored)
    assert first == before
    assert second["reason"] == "another reason, another day"
    assert second["starts"] == []
    assert first["run"] != second["run"]


def test_a_speedup_that_moved_begins_a_level_and_is_shown_old_to_new(stored, monkeypatch):
    [before] = sessions(stored)
    install(monkeypatch, H200, speedup=1.1)
    result = stored.runpytest(*update("the new kernel"))
    result.stdout.fnmatch_lines(
        [
            "baseline h200/tiny-torchao-rowwise, old -> new:",
            "*fp8_share *-> *same",
            "*speedup *1.[12]*x -> 1.[01]*x *-8.*% [[]-*%, -*%] *worse",
            "*a new level begins, and earlier sessions are not gated on: *speedup*",
            "wrote baselines/h200/tiny-torchao-rowwise.json",
        ]
    )
    first, second = sessions(stored)
    assert first == before, "what is stored never changes"
    assert set(second["starts"]) == {"speedup", "bf16_ms", "fp8_ms"}, "timed together"
    assert second["reason"] == "the new kernel"
    again = stored.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    again.assert_outcomes(passed=1, deselected=9)


def test_memory_that_moved_leaves_the_level_of_the_speedup(stored, monkeypatch):
    install(monkeypatch, H200, fp8_memory=99)
    stored.runpytest(*update("copies kept")).stdout.fnmatch_lines(["*memory_ratio *0.900x -> 0.990x *+10*worse"])
    _, second = sessions(stored)
    assert second["starts"] == ["activation_ratio", "memory_ratio"], "measured together"
    assert second["metrics"]["memory_ratio"] == [0.99]


def test_a_session_holds_only_what_it_measured(stored, monkeypatch):
    install(monkeypatch, H200, fp8_memory=99)
    stored.runpytest(*update("memory alone", "-k", "layers or memory"))
    first, second = sessions(stored)
    assert "loss_gap" in first["metrics"]
    assert not {"loss_gap", "speedup", "fp8_ms"} & set(second["metrics"])
    assert {"fp8_share", "memory_ratio"} <= set(second["metrics"])


def test_a_full_file_keeps_eight_sessions_and_the_only_answer_to_a_question(stored):
    for count in range(7):
        assert stored.runpytest(*update(f"night {count}", "-k", "layers and rowwise")).ret == 0
    assert len(sessions(stored)) == 8
    result = stored.runpytest(*update("one more", "-k", "layers and rowwise"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*was not updated: *the oldest, which would leave it, is the only one that answered*"])
    assert stored.runpytest(*update("all of it", "-k", "rowwise")).ret == 0
    assert len(sessions(stored)) == 8
    assert sessions(stored)[0]["reason"] == "night 0"


def test_one_process_is_no_evidence(suite, monkeypatch):
    world = install(monkeypatch, H200)
    result = suite.runpytest(*update("first", "--fp8-processes=1"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--fp8-processes*", "*a whole number from 2*", "*one process may be slow by chance*"])
    assert not world.built, "it is said before anything is measured"
    assert LEAST_PROCESSES == RUNS_TO_FAIL
    steps = {"speedup": [[0.1]] * 4}
    assert not too_few(steps)
    assert too_few({**steps, "busy_speedup": [[0.2]]}), "what is gated on is one process's"
    assert not too_few({**steps, "busy_speedup": [[0.2]] * 2})


@pytest.mark.parametrize("change", [{"case_hash": "0" * 16}, {"schema": 1}], ids=["hash", "schema"])
def test_a_file_that_cannot_be_compared_with_is_replaced_whole(stored, change):
    edit(stored.path / FILE, lambda data: data.update(change), sign="digest" not in change)
    result = stored.runpytest(*update("redefined"))
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise is new (the earlier file cannot be compared with: *"])
    [session] = sessions(stored)
    assert session["reason"] == "redefined"


@pytest.mark.parametrize("schema", [3, "2", None], ids=["newer", "text", "none"])
def test_what_a_newer_version_may_have_written_is_not_written_over(stored, schema):
    edit(stored.path / FILE, lambda data: data.update(schema=schema) if schema else data.pop("schema"))
    before = (stored.path / FILE).read_text()
    result = stored.runpytest(*update("again"))
    assert result.ret == 1
    if schema:
        result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json has another schema*"])
    assert (stored.path / FILE).read_text() == before


@pytest.mark.parametrize("text", ["{", "<<<<<<< HEAD", None], ids=["cut", "merged", "edited"])
def test_a_history_that_cannot_be_read_is_not_written_over(stored, text):
    file = stored.path / FILE
    if text is None:
        edit(file, lambda data: data.update(digest="0" * 64), sign=False)
    else:
        file.write_text(text)
    before = file.read_text()
    result = stored.runpytest(*update("again"))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json *", "*git*"])
    assert file.read_text() == before


def test_an_update_that_stores_nothing_fails_and_says_why(stored, monkeypatch):
    install(monkeypatch, None)
    result = stored.runpytest("--fp8-update-baselines", "--fp8-reason=none")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*nothing was stored: needs a hopper GPU: no NVIDIA GPU (fake)*"])


def test_an_update_that_no_commit_names_says_so(stored, monkeypatch):
    said = "*the sessions that were stored name no commit*"
    stored.runpytest(*update()).stdout.fnmatch_lines([said])
    monkeypatch.setenv("PYTEST_FP8_COMMIT", "0123456789ab")
    stored.runpytest(*update()).stdout.no_fnmatch_line(said)


def test_the_first_file_written_does_not_make_the_tree_dirty(stored, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        assert stored.run(*git, *arguments).ret == 0
    install(monkeypatch, H200, speedup=1.1)
    assert stored.runpytest(*update("both")).ret == 0
    written = [sessions(stored, path) for path in (stored.path / "baselines/h200").glob("*.json")]
    assert [stored[-1]["dirty"] for stored in written] == [False, False]


def test_no_other_run_can_update_until_all_is_written(suite, monkeypatch):
    install(monkeypatch, H200)
    written = []

    def write(path, text):
        with pytest.raises(BaselineError, match="another run is updating"), updating(suite.path / "baselines"):
            pass
        written.append(path.stem)

    monkeypatch.setattr("pytest_fp8.baselines.store.write_atomically", write)
    assert suite.runpytest(*update()).ret == 0
    assert written == ["tiny-torchao-rowwise", "tiny-te-current"]
    with updating(suite.path / "baselines"):
        pass


# -- candidates ---------------------------------------------------------------------------------------------------


def test_a_plain_run_writes_candidates_and_leaves_the_baselines(stored, monkeypatch):
    before = (stored.path / FILE).read_bytes()
    install(monkeypatch, H200, fp8_memory=99)
    stored.runpytest("--fp8-gpu=h200", "--fp8-report-dir=out", "-k", "layers or memory")
    assert (stored.path / FILE).read_bytes() == before
    old, new = sessions(stored, CANDIDATE)
    assert [old] == sessions(stored), "the stored session, and this one behind it"
    assert "unfit" not in new
    assert new["metrics"]["memory_ratio"] == [0.99]
    assert "speedup" not in new["metrics"], "not asked in this run"


def test_a_candidate_says_why_it_is_not_fit_to_be_stored(stored, monkeypatch):
    install(monkeypatch, H200, executed_roles=("fprop",))
    stored.runpytest("--fp8-gpu=h200", "--fp8-report-dir=out")
    assert "FP8 was not shown to run" in sessions(stored, CANDIDATE)[-1]["unfit"]


# -- what a whole run had no use for ------------------------------------------------------------------------------


def test_orphaned_and_unexercised_baselines_are_named_after_a_whole_run(stored, monkeypatch):
    folder = stored.path / "baselines/h200"
    (folder / "tiny-torchao-gone.json").write_text((stored.path / FILE).read_text())
    install(monkeypatch, H200, fails={"tiny-te-current": "died"})
    result = stored.runpytest("--fp8-gpu=h200")
    result.stdout.fnmatch_lines(
        [
            "1 orphaned baseline(s), of no case of this suite: tiny-torchao-gone",
            "1 unexercised baseline(s), asked nothing in this run: tiny-te-current",
        ]
    )


@pytest.mark.parametrize("arguments", [("-k", "layers"), ("test_orphan.py",), ("--maxfail=1",)])
def test_a_run_of_a_part_names_no_orphans(stored, monkeypatch, arguments):
    (stored.path / "baselines/h200/tiny-torchao-gone.json").write_text((stored.path / FILE).read_text())
    stored.makepyfile(test_orphan=SUITE)
    install(monkeypatch, H200, nan_at=3)
    result = stored.runpytest("--fp8-gpu=h200", *arguments)
    result.stdout.no_fnmatch_line("*orphaned*")


def test_a_whole_run_that_used_all_baselines_names_none(stored):
    result = stored.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=10)
    result.stdout.no_fnmatch_line("*orphaned*")
    result.stdout.no_fnmatch_line("*unexercised*")


def test_one_partial_xdist_worker_makes_the_run_partial():
    whole, part = Ledger(collected=["a"]), Ledger(collected=["b"], partial=True)
    for worker in (whole, part):
        controller = Ledger()
        controller.merge(worker.to_json())
        assert controller.partial is worker.partial
        controller.merge(part.to_json())
        assert controller.partial
        assert "b" in controller.collected


def test_the_rows_of_xdist_workers_stand_in_one_order_whichever_ends_first():
    parts = [Ledger(entries={name: Entry(name)}) for name in ("tiny", "micro")]
    for order in (parts, parts[::-1]):
        controller = Ledger()
        for worker in order:
            controller.merge(worker.to_json())
        assert list(controller.entries) == ["micro", "tiny"]


def test_a_folder_that_cannot_be_made_is_a_usage_error_at_the_start(suite, monkeypatch):
    install(monkeypatch, H200)
    (suite.path / "a_file").write_text("")
    result = suite.runpytest(*update(), "--fp8-baseline-dir=a_file/below")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*cannot be updated*", "*NotADirectoryError*", "*--fp8-baseline-dir*"])


CUT_SHORT = """
    @pytest.fixture(autouse=True)
    def cut_short(request):
        if request.node.name == "test_loss[tiny-te-current]":
            {how}
"""


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


def test_under_xdist_open_are_the_tests_that_no_worker_ran():
    learned = Ledger()
    for tests in ({"a": ["a1", "a2"], "b": ["b1"]}, {"a": ["a2"], "b": ["b1"]}, {"a": ["a1", "a2"]}):
        worker = Ledger(open_tests=tests)
        learned.merge(json.loads(json.dumps(worker.to_json())))
    assert learned.open_tests is not None
    assert learned.to_json()["open_tests"] == {"a": ["a2"]}


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


def test_a_speedup_that_the_host_limits_is_stored_with_a_note(suite, monkeypatch):
    install(monkeypatch, H200, busy=30.0)
    first = suite.runpytest(*update())
    assert first.ret == 0
    first.stdout.fnmatch_lines(
        [
            "*baseline of tiny-torchao-rowwise is this host's as much as the GPU's: launch-bound: *works 30.0 ms*",
            "  next: store one with a larger batch; on a slower host this one's gate may fail",
        ]
    )
    install(monkeypatch, H200, busy=30.0, speedup=1.0)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    assert result.ret == 1, "not answered on a declared GPU, and nothing that FP8 is blamed for"
    result.assert_outcomes(deselected=9)
    result.stdout.fnmatch_lines(["*INVALID*an arm waits for its host, and the baseline has step times alone*"])


def test_busy_time_is_stored_and_gated_on_where_the_host_makes_step_times_scatter(suite, monkeypatch):
    # Step times alone would be refused: their processes spread too much.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8)
    first = suite.runpytest(*update(), "-k", "(test_speedup or test_layers) and rowwise")
    assert first.ret == 0
    first.stdout.fnmatch_lines(["*baseline of tiny-torchao-rowwise is gated on busy time, since step time is *"])
    stored = load_baseline(suite.path / "baselines" / "h200" / "tiny-torchao-rowwise.json")
    assert len(stored.values("busy_speedup")) == len(stored.values("speedup")) == 4
    again = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    again.assert_outcomes(passed=1, deselected=9)
    # A host that holds nothing up changes nothing: the case is gated on busy time from then on.
    install(monkeypatch, H200, busy=95.0, kernels_alone=True)
    quiet = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise", "--fp8-report-dir=report")
    quiet.assert_outcomes(passed=1, deselected=9)
    report = json.loads((suite.path / "report" / "report.json").read_text())
    assert report["entries"]["tiny-torchao-rowwise"]["decisions"]["speedup"]["numbers"]["gated_on"] == "busy time"
    install(monkeypatch, H200, busy=95.0, kernels_alone=True, host=0.8, speedup=1.1)
    slower = suite.runpytest("--fp8-gpu=h200", "-k", "test_speedup and rowwise")
    slower.assert_outcomes(failed=1, deselected=9)
    slower.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*", "*of busy time*"])


def test_a_gpu_that_is_always_busy_has_no_such_note(suite, monkeypatch):
    install(monkeypatch, H200, busy=1e3)
    result = suite.runpytest(*update())
    assert result.ret == 0
    result.stdout.fnmatch_lines(["wrote baselines/h200/tiny-torchao-rowwise.json"])
    result.stdout.no_fnmatch_line("*launch-bound*")


# -- missing, obsolete, measured otherwise, and from a revision ----------------------------------------------------


def committed(suite, message="all"):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", message]):
        assert suite.run(*git, *arguments).ret == 0


def test_a_missing_baseline_is_said_outside_ci(suite, monkeypatch):
    install(monkeypatch, H200)
    result = suite.runpytest("--fp8-gpu=h200", "-k", "rowwise")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["no baseline for 1 case(s) on h200, so 2 question(s) *; next: *update-baselines*"])


def test_a_metric_that_was_removed_from_a_baseline_is_missing(stored, monkeypatch):
    edit(stored.path / FILE, lambda data: data["sessions"][0]["metrics"].pop("memory_ratio"))
    monkeypatch.setenv("CI", "true")
    result = stored.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["no baseline for 1 case(s) on h200, so 1 question(s) compared with nothing*"])


def test_an_obsolete_baseline_fails_in_ci(stored, monkeypatch):
    shutil.copy(stored.path / FILE, stored.path / "baselines/h200/tiny-torchao-gone.json")
    assert stored.runpytest("--fp8-gpu=h200").ret == 0
    monkeypatch.setenv("CI", "true")
    result = stored.runpytest("--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["1 orphaned baseline(s), *: tiny-torchao-gone", "  next: delete these files, or find*"]
    )


def test_figures_that_were_taken_another_way_are_gated_on_with_a_note(stored):
    edit(stored.path / FILE, lambda data: data["sessions"][0].update(measurement=1))
    result = stored.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=10)
    result.stdout.fnmatch_lines(["1 baseline(s) were gated on although *taken another way*: tiny-torchao-rowwise"])
    result.stdout.fnmatch_lines(["  next: pytest-fp8 suites -k tiny-torchao-rowwise --fp8-gpu=h200 *"])


@pytest.mark.parametrize("metric", ["memory_ratio", "bf16_ms", "speedup"])
def test_no_number_in_a_baseline_fails_the_case_s_tests(stored, metric):
    text, found = re.subn(rf'("{metric}": [\[\s]+)[-0-9.e]+', r"\1NaN", (stored.path / FILE).read_text())
    assert found == 1
    (stored.path / FILE).write_text(text)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-strict")
    result.assert_outcomes(passed=5, errors=5)
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise.json is not a readable baseline*", "*NaN is no number*"])


def test_a_pull_request_does_not_bring_its_own_baselines(stored, monkeypatch):
    committed(stored)
    install(monkeypatch, H200, speedup=1.1)
    for file in (stored.path / "baselines/h200").glob("*.json"):
        file.unlink()
    assert stored.runpytest(*update("mine")).ret == 0
    only = ("-k", "test_speedup and rowwise")
    stored.runpytest("--fp8-gpu=h200", *only).assert_outcomes(passed=1, deselected=9)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-baselines-from=main", *only)
    result.assert_outcomes(failed=1, deselected=9)
    result.stdout.fnmatch_lines(["*FP8 lost speed against BF16 since the baseline*"])
    monkeypatch.setenv("PYTEST_FP8_BASELINES_FROM", "main")
    stored.runpytest("--fp8-gpu=h200", *only).assert_outcomes(failed=1, deselected=9)


def test_a_revision_without_the_case_s_file_is_one_error(stored):
    (stored.path / FILE).unlink()
    committed(stored)
    result = stored.runpytest("--fp8-gpu=h200", "--fp8-baselines-from=main")
    result.stdout.fnmatch_lines(["*baselines: those of git revision main"])
    assert result.ret == 1
    result.stdout.fnmatch_lines(["no baseline for 1 case(s) on h200 at git revision main, so 2 question(s) *"])


@pytest.mark.parametrize(
    ("revision", "next_step"), [("main", "git log"), ("nowhere", "git branch"), ("--output=x", "git branch")]
)
def test_a_revision_without_baselines_is_a_usage_error_at_the_start(suite, monkeypatch, revision, next_step):
    install(monkeypatch, H200)
    committed(suite)
    result = suite.runpytest("--fp8-gpu=h200", f"--fp8-baselines-from={revision}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*baselines of * at git revision '{revision}' cannot be read", f"*next: *{next_step}*"])
