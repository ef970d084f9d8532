"""Baselines: files that come back or are refused, what is noise and what has moved, and ``pytest-fp8 baselines``."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.baselines import GOOD, LATER, baseline, edit, mutants, read, session
from pytest_fp8 import Case
from pytest_fp8.baselines.record import MAX_SESSIONS, Baseline, to_text
from pytest_fp8.baselines.review import compare_histories, compare_metric, revise, tampering
from pytest_fp8.baselines.store import (
    Folder,
    baseline_path,
    held_against,
    load_baseline,
    read_folder,
    write_baseline,
)
from pytest_fp8.baselines.update import appended, why_not_stored
from pytest_fp8.cli import main
from pytest_fp8.codes import B
from pytest_fp8.errors import BaselineError
from pytest_fp8.plain import strict_json
from pytest_fp8.stats.components import MEASURED

ROOT = Path(__file__).parents[2]
FILE = baseline_path(Path(), "h200", GOOD.case)
FIELDS = strict_json(to_text(GOOD))


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def refused(folder, **asked):
    with pytest.raises(BaselineError) as error:
        read(folder, **asked)
    return error.value


def test_what_is_written_is_read(stored):
    assert read(stored) == GOOD
    odd = replace(GOOD, sessions=(replace(GOOD.newest, reason='"\u2028{é\n', metrics={"loss_gap": [-1e-17, 1 / 3]}),))
    write_baseline(stored, odd)
    assert read(stored) == odd
    write_baseline(stored, GOOD)
    assert read(stored).values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert read(stored).values("memory_ratio") == []
    assert read(stored, case="8b-te-block") is None


@pytest.mark.parametrize("text", ["\x00\xff", '{"schema": 99}', '{"schema": NaN}'])
def test_a_corrupt_file_is_named(stored, text):
    (stored / FILE).write_text(text, encoding="latin-1")
    error = refused(stored)
    assert (error.code, str(stored / FILE) in error.headline) == (B.UNREADABLE, True)


@pytest.mark.parametrize("name", [*FIELDS, *(f"sessions.{name}" for name in FIELDS["sessions"][0])])
def test_a_field_that_is_missing_or_of_another_kind_is_named(stored, name):
    *inside, name = name.split(".")

    def part(data):
        return data["sessions"][0] if inside else data

    edit(stored / FILE, lambda data: part(data).update({name: 3.5}), sign=name != "digest")
    assert name in refused(stored).seen
    edit(stored / FILE, lambda data: part(data).pop(name), sign=name != "digest")
    assert f"lacks '{name}'" in refused(stored).seen
    write_baseline(stored, GOOD)
    edit(stored / FILE, lambda data: part(data).update(unknown=1))
    assert "has no field 'unknown'" in refused(stored).seen


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("speedup", [0.1, 0.2]),
        ("speedup", [[9.0], [9.0]]),
        ("fp8_share", [1.5]),
        ("fp8_share", [True]),
        ("relic", [1]),
    ],
)
def test_figures_that_no_session_measures_are_refused_although_the_digest_fits(stored, metric, values):
    edit(stored / FILE, lambda data: data["sessions"][0]["metrics"].update({metric: values}))
    assert metric in refused(stored).seen


@pytest.mark.parametrize("count", [0, 9])
def test_a_file_has_one_to_eight_sessions(stored, count):
    edit(stored / FILE, lambda data: data.update(sessions=data["sessions"] * count))
    assert f"has {count} values, not 1 to 8" in refused(stored).seen


def test_a_changed_file_is_refused_or_reads_as_the_untouched_one(tmp_path):
    original = ROOT / "baselines/h200/1b-torchao-tensorwise.json"
    true, path = load_baseline(original), tmp_path / "h200" / original.name
    path.parent.mkdir()
    for way, data in mutants(original.read_text(), 200, seed=1):
        path.write_bytes(data)
        try:
            found = load_baseline(path)
        except BaselineError:
            continue
        # Who signs an edit can make it fit: that is what diff shows.
        assert way == "signed" or found == true


def test_a_baseline_of_another_gpu_case_or_definition_is_never_compared_with(stored):
    assert refused(stored, case_hash="def").code is B.REDEFINED
    for gpu, case in (("h100", GOOD.case), ("h200", "8b-te-block")):
        path = baseline_path(stored, gpu, case)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes((stored / FILE).read_bytes())
        assert f"the baseline of h200/{GOOD.case}" in refused(stored, gpu=gpu, case=case).seen


def test_a_level_has_its_own_history_and_busy_times_are_no_older_than_that_of_step_time():
    two = replace(GOOD, sessions=(*GOOD.sessions, LATER))
    assert (two.values("fp8_share"), two.values("speedup")) == ([0.8], [[0.1, 0.11], [0.12, 0.1]])
    assert two.history("fp8_share") == [[0.78], [0.8]]
    moved = replace(GOOD, sessions=(*GOOD.sessions, replace(LATER, starts=("fp8_share",))))
    assert (moved.history("fp8_share"), len(moved.history("speedup"))) == ([[0.8]], 1)
    speedup, busy = {"speedup": [[0.1], [0.1]]}, {"busy_speedup": [[0.2], [0.2]]}
    first = replace(GOOD.newest, metrics={**speedup, **busy}, starts=())
    moved, again = replace(first, metrics=speedup, starts=("speedup",)), replace(first, metrics={**speedup, **busy})
    assert replace(GOOD, sessions=(first, moved)).history("busy_speedup") == []
    assert len(replace(GOOD, sessions=(first, moved, again)).history("busy_speedup")) == 1


@pytest.mark.parametrize("busy", [True, False])
def test_an_update_is_held_against_nothing_and_knows_what_the_stored_one_is_gated_on(tmp_path, busy):
    made = baseline("1b-te-block", "abc", metrics={"speedup": [[0.1], [0.1]], "busy_speedup": [[0.2], [0.2]]})
    made = replace(made, sessions=(replace(made.newest, host_bound=busy),))
    write_baseline(tmp_path, made)
    assert made.gated == ("busy_speedup" if busy else "speedup")
    of_gate, of_update = (held_against(Folder(tmp_path), "h200", "1b-te-block", "abc", x) for x in (False, True))
    assert (of_gate, of_update) == ((made, busy), (None, busy))
    assert held_against(Folder(tmp_path), "h200", "1b-te-block", "defined anew", update=True) == (None, False)


def test_baselines_are_read_from_a_revision_and_the_checkout_does_not_count(stored):
    git = ["git", "-C", str(stored), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (stored / "h200/8b-te-block.json").symlink_to("/etc/passwd")
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    write_baseline(stored, replace(GOOD, case_hash="new"))
    assert read(Folder(stored, "main")) == GOOD
    # A change that defines a case anew has none there, and cannot bring its own.
    assert held_against(Folder(stored, "main"), "h200", GOOD.case, "new", update=False) == (None, False)
    assert read(Folder(stored, "main"), case="8b-te-block") is None, "a link is no file of the revision"
    assert Folder(stored, "main").names() == [FILE]
    for revision in ("nowhere", "--output=x"):
        assert refused(Folder(stored, revision)).code is B.NO_REVISION


def test_what_only_looks_like_a_baseline_is_named_and_not_left_out(stored):
    (stored / "h200/8b-te-block.json").mkdir()
    (stored / "h200/_notes.json").write_text("{")
    files = read_folder(stored)
    assert {str(path) for path, each in files.items() if isinstance(each, BaselineError)} == {"h200/8b-te-block.json"}
    assert files[FILE] == GOOD


# -- writing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_a_full_disk_at_any_step_loses_nothing(stored, monkeypatch, step):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        with pytest.raises(BaselineError, match=r"could not write .*1b-torchao-rowwise\.json") as error:
            write_baseline(stored, replace(GOOD, case_hash="new"))
    assert error.value.code is B.NOT_WRITTEN
    assert ".tmp" not in str(error.value), "the hidden file is gone"
    assert read(stored) == GOOD
    assert [path.name for path in (stored / "h200").iterdir()] == [FILE.name], "nothing half-written"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(stored, step):
    child = os.fork()
    if child == 0:
        setattr(os, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_baseline(stored, replace(GOOD, case_hash="new"))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert read(stored) == GOOD
    assert list(read_folder(stored)) == [FILE], "what is unfinished is no baseline"
    write_baseline(stored, replace(GOOD, case_hash="new"))


# -- noise or moved: by simulation, how often an unchanged baseline is rewritten and a changed one left ----------------

BETWEEN, WITHIN = 0.003, 0.004


def measured(rng, processes=2, change=0.0, between=BETWEEN):
    return [list(0.11 + change + rng.normal(0, between) + rng.normal(0, WITHIN, 6)) for _ in range(processes)]


@pytest.mark.parametrize(
    ("words", "change", "processes", "between", "least"),
    [
        (["noise"], 0.0, 2, 0.003, 0.96),
        (["noise"], 0.0, 4, 0.006, 0.96),
        (["worse"], -0.05, 2, 0.003, 0.98),
        (["better"], 0.05, 2, 0.003, 0.98),
        (["moved", "worse"], -0.02, 4, 0.003, 0.9),
    ],
)
def test_noise_is_left_alone_and_a_change_beyond_it_moves_a_speedup(words, change, processes, between, least):
    rng = np.random.default_rng(3)

    def word():
        before, now = (measured(rng, processes, by, between) for by in (0.0, change))
        return compare_metric("speedup", [before], now, tolerance=0.03).word

    assert np.mean([word() in words for _ in range(500)]) > least


@pytest.mark.parametrize(
    ("name", "old", "new", "word"),
    [
        ("fp8_share", 0.78, 0.78 + 1e-12, "noise"),
        ("fp8_share", 0.78, 0.78 - 1e-6, "worse"),
        ("fp8_share", 0.78, 0.79, "better"),
        ("memory_ratio", 0.85, 0.866, "noise"),
        ("memory_ratio", 0.85, 0.868, "worse"),
        ("loss_gap", -0.03, -0.015, "noise"),
        ("loss_gap", -0.03, 0.0, "worse"),
        ("fp8_share", 1.0, 1.0, "same"),
        ("fp8_share", None, 1.0, "new"),
        ("fp8_share", 1.0, None, "not measured"),
        ("bf16_ms", 120.0, 140.0, "moved"),
    ],
)
def test_exact_metrics_move_at_once_and_banded_ones_beyond_their_band(name, old, new, word):
    before, now = [[[old]] if old is not None else [], [new] if new is not None else []]
    assert compare_metric(name, before, now).word == word


LUCKY, ALIKE = [[[x] * 6] * 4 for x in (0.11, 0.111, 0.109, 0.12)], [[[0.1] * 6] * 4] * 4


@pytest.mark.parametrize(
    ("levels", "now", "components", "word"),
    [
        # One session that lay 1 % high by chance is not the level of four.
        (LUCKY, 0.11, MEASURED, "noise"),
        (LUCKY, 0.07, MEASURED, "worse"),
        # A GPU whose sessions differ by 1.5 % has not moved by 2 %; its gate says the same.
        (ALIKE, 0.08, MEASURED, "moved"),
        (ALIKE, 0.08, replace(MEASURED, session=0.015), "noise"),
    ],
)
def test_a_session_is_compared_with_a_whole_history_by_the_components_of_its_gpu(levels, now, components, word):
    assert compare_metric("speedup", levels, [[now] * 6] * 4, components=components).word == word


# -- sessions -----------------------------------------------------------------------------------------------------


def of_shares(*shares, **metrics):
    """A baseline of one session per share, on one day each."""
    sessions = [session(metrics={"fp8_share": [x], **metrics}, date=f"2026-11-{10 + i}") for i, x in enumerate(shares)]
    return Baseline("c", "h", "h200", tuple(sessions))


def new_session(day=28, **metrics):
    return baseline("c", "h", metrics=metrics, date=f"2026-11-{day}", run=f"{day:012}")


def added(old, new):
    return appended(old, new, revise(old, new).starts())


def test_a_session_that_moved_nothing_joins_the_level_and_one_that_moved_begins_another():
    now = added(of_shares(0.5, memory_ratio=[0.9]), new_session(fp8_share=[0.5], memory_ratio=[0.95]))
    assert [s.starts for s in now.sessions] == [(), ("memory_ratio",)]
    assert now.history("fp8_share") == [[0.5], [0.5]]
    assert now.history("memory_ratio") == [[0.95]]


SPEED, STEPS = {"speedup": [[0.1] * 6] * 4}, {"bf16_ms": [100.0] * 4, "fp8_ms": [90.0] * 4}
ON_BUSY = {**SPEED, "busy_speedup": [[0.2] * 5] * 4, **STEPS}
SLOW_HOST = {**ON_BUSY, "speedup": [[-0.1] * 6] * 4, "fp8_ms": [110.0] * 4}


@pytest.mark.parametrize(
    ("old", "new", "starts", "worse"),
    [
        # What was timed together begins a level together, and a slower host begins none.
        (SPEED, {"speedup": [[0.2] * 6] * 4}, ["speedup", "bf16_ms", "fp8_ms"], False),
        (SPEED, {**SPEED, "bf16_ms": [150.0] * 4}, [], False),
        # Nor do step times that the host decides, which are never worse. Busy times silence none that are stored.
        (ON_BUSY, SLOW_HOST, [], False),
        (ON_BUSY, {"busy_speedup": [[0.1] * 5] * 4}, None, True),
        (SPEED, {"speedup": [[0.0] * 6] * 4, "busy_speedup": [[0.2] * 5] * 4}, None, True),
    ],
)
def test_which_metrics_begin_a_level_and_which_are_worse(old, new, starts, worse):
    revision = revise(baseline("c", "h", metrics=old), new_session(**new))
    assert revision.worse is worse
    assert starts is None or revision.starts() == starts


def test_an_account_is_kept_and_not_compared_and_its_edit_is_found():
    told, speed = {"casts_ms": [9.0], "earned_ms": [20.0]}, {"speedup": [[0.1] * 6] * 4}
    old, new = baseline("c", "h", metrics={**speed, **told}), new_session(**speed, **{**told, "casts_ms": [90.0]})
    assert (revise(old, new).changed, revise(old, new).starts()) == (False, [])
    assert added(old, new).newest.metrics["casts_ms"] == [90.0]
    assert tampering(old, baseline("c", "h", metrics={**speed, **told, "casts_ms": [90.0]}))


def test_a_full_file_loses_its_oldest_session():
    full = of_shares(*[0.5] * MAX_SESSIONS)
    assert len(full.sessions) == MAX_SESSIONS
    now = added(full, new_session(fp8_share=[0.5]))
    assert now.sessions[:-1] == full.sessions[1:]
    assert tampering(full, now) == ""
    assert compare_histories(full, now).worse is False


def without(index):
    return lambda sessions: sessions[:index] + sessions[index + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        without(0),
        without(2),
        lambda s: (session(metrics={"fp8_share": [0.4]}, date="2026-11-10"), *s[1:]),
        lambda s: (session(metrics={"fp8_share": [0.5]}, date="2026-11-10", reason="x"), *s[1:]),
        lambda s: (*s[:1], *new_session(fp8_share=[0.5]).sessions, *s[1:]),
        lambda s: s[::-1],
    ],
    ids=["oldest gone", "newest gone", "edited", "another reason", "put before older ones", "reversed"],
)
def test_a_history_that_was_touched_is_worse(change):
    old = of_shares(0.5, 0.5, 0.5)
    revision = compare_histories(old, Baseline("c", "h", "h200", tuple(change(old.sessions))))
    assert revision.worse
    assert "not the stored ones" in revision.tampered


def test_a_metric_that_is_gone_was_removed():
    old = Baseline("c", "h", "h200", (session(metrics={"fp8_share": [0.5], "memory_ratio": [0.9]}),))
    revision = compare_histories(old, new_session(fp8_share=[0.5]))
    assert {change.metric: change.word for change in revision.changes}["memory_ratio"] == "removed"
    assert revision.worse


@pytest.mark.parametrize(
    ("question", "verdict", "why"),
    [
        ("layers", "FAIL", "FP8 was not shown to run"),
        ("speedup", "INVALID", "the timing is invalid"),
        ("faster", "INVALID", "the timing is invalid"),
        ("memory", "INVALID", "the memory question is invalid"),
        *((name, "FAIL", f"the {name} question failed") for name in ("numerics", "loss", "checkpoints")),
        # A change for the worse may be accepted, and is what an update is for.
        ("speedup", "FAIL", ""),
        ("memory", "FAIL", ""),
        ("loss", "INCONCLUSIVE", ""),
    ],
)
def test_what_is_wrong_of_a_session_keeps_its_figures_out_of_the_baselines(question, verdict, why):
    answers = {"layers": "PASS", question: verdict}
    decisions = {name: SimpleNamespace(verdict=each, headline="seen") for name, each in answers.items()}
    entry = SimpleNamespace(namesakes=0, errors=(), decisions=decisions)
    said = why_not_stored(SimpleNamespace(entries={"1b": entry}, open_tests={}), "1b")
    assert said == (why and f"{why} (seen)")


# -- the command: what it lists, finds and calls worse, and its exit codes ---------------------------------------------

THE_FILE = "baselines/h200/1b-torchao-rowwise.json"


SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")]
EMULATED = (Case("tiny", "torchao", "rowwise", emulated=True),)
NULL = Case("1b", "bf16", "none", questions=("speedup",))
"""
CASE = Case("1b", "torchao", "rowwise")
QUIET = [[0.1, 0.101, 0.099, 0.1, 0.1, 0.1], [0.102, 0.101, 0.102, 0.103, 0.102, 0.102]]


def of_case(case=CASE, speed=QUIET, memory=0.85, **origin):
    metrics = {
        "speedup": speed,
        "bf16_ms": [120.0, 120.4],
        "fp8_share": [0.78],
        "fp8_layers": [28],
        "memory_ratio": [memory],
        "loss_gap": [0.005, -0.001, 0.01],
    }
    return baseline(case.id, case.digest(), metrics=metrics, **origin)


def later(**change):
    """The project's baseline with a session behind its first."""
    first = of_case()
    return replace(first, sessions=(*first.sessions, *of_case(date="2026-11-21", run=f"{21:012}", **change).sessions))


def faster(by):
    return [[x + by for x in blocks] for blocks in QUIET]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a suite and one stored baseline, both committed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites/matrix.py").write_text(SUITE)
    write_baseline(tmp_path / "baselines", of_case())
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    return tmp_path


@pytest.fixture
def run(project, capsys):
    """Calls `pytest-fp8 baselines` with its arguments: the exit code, what it printed, and its errors."""

    def call(*arguments):
        code = main(["baselines", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_list_has_one_line_per_baseline_and_its_origin_below(run, project):
    code, out, _ = run("list")
    assert code == 0
    line = next(line for line in out.splitlines() if "1b-torchao-rowwise" in line)
    assert line.split()[:2] == ["1b-torchao-rowwise", "h200"]
    assert "1.106x [1.1" in line
    assert {"78.00%", "0.850x", "+0.0047"} <= set(line.split())
    assert "from 1: 2026-11-20, commit 0123456789ab, torch 1.0.0: first" in out
    assert "\x1b" not in out, "plain where there is no terminal"
    (project / "baselines/h200/bad.json").write_text("{")
    code, out, err = run("list")
    assert (code, "1b-torchao-rowwise" in out) == (2, True)
    assert "bad.json is not a readable baseline" in err


def storing(**changes):
    return lambda project: write_baseline(project / "baselines", replace(of_case(), **changes))


def another(case, gone=False):
    """A baseline of another case, beside that of the project or in its place."""

    def change(project):
        write_baseline(project / "baselines", of_case(case))
        if gone:
            (project / THE_FILE).unlink()

    return change


def measured_again(**change):
    return lambda project: write_baseline(project / "baselines", later(**change))


def suite(old, new, name="suites/matrix.py", then=lambda project: None):
    def change(project):
        (project / name).write_text(SUITE.replace(old, new))
        then(project)

    return change


def removed(*folders):
    return lambda project: [shutil.rmtree(project / folder) for folder in folders]


def alone(text):
    """A project without a suite, and a baseline with this text beside its sound one."""

    def change(project):
        another(Case("own", "torchao", "rowwise", name="mine"))(project)
        removed("suites")(project)
        if text:
            (project / "baselines/h200/mine.json").write_text(text)

    return change


def renamed(project):
    (project / THE_FILE).rename(project / THE_FILE.replace("rowwise", "tensorwise"))


OTHER = Case("8b", "torchao", "rowwise")
COARSE = of_case(speed=[[0.0] * 6, [0.2] * 6]).sessions
UNTIMED = 'Case("1b", "torchao", "rowwise", questions=("layers", "memory"))'
SLOWER = {"speed": faster(-0.06)}
COMMANDS = [  # what is changed, arguments, exit code, what is said
    (None, "list 1b-torchao-rowise", 2, "next: did you mean '1b-torchao-rowwise'?"),
    (None, "list --gpu h20o", 2, "next: did you mean 'h200'?"),
    (None, "check --gpu h20o", 2, "next: did you mean 'h200'?"),
    # Gaps are notes; a control has no baseline. `tests/words/test_words.py` has the other codes.
    (None, "check", 0, "this case and no baseline is stored for it: 1b-torchao-tensorwise"),
    (None, "check", 0, "1 baselines: 0 error(s), 1 note(s)"),
    (renamed, "check", 1, B.UNREADABLE),
    (another(OTHER), "check", 1, B.ORPHANED),
    (storing(case_hash="0" * 16), "check", 1, B.REDEFINED),
    # The speed of a case that is asked for none is not too coarse.
    (suite('Case("1b", "torchao", "rowwise")', UNTIMED, then=storing(sessions=COARSE)), "check", 0, ""),
    # Without a suite each file is looked at alone; a folder of suites without one is no clean bill.
    (lambda project: (project / "suites/matrix.py").unlink(), "check", 2, "--suite"),
    (alone(""), "check", 0, "2 baselines, each looked at alone, for no "),
    (alone("{"), "check", 1, ""),
    (alone(""), "check --suite matrix.py", 2, ""),
    (removed("suites", "baselines"), "check", 2, ""),
    # Worse, better, noise.
    (measured_again(), "diff", 0, "0 changed, 1 as they were"),
    (measured_again(**SLOWER, libraries={"torch": "2.0.0"}), "diff", 1, "torch 1.0.0 -> 2.0.0"),
    (measured_again(**SLOWER), "diff", 1, "1.106x -> 1.042x -5.82% [-7."),
    (measured_again(speed=faster(-0.019)), "diff", 0, "moved"),
    (measured_again(memory=0.95), "diff", 1, "0.850x -> 0.950x +11.76% (band 2%)"),
    # The tolerance of a speedup is the case's own.
    (measured_again(speed=faster(-0.03)), "diff", 1, ""),
    (
        suite('"rowwise")', '"rowwise", tolerance=0.08)', "wide.py", then=measured_again(speed=faster(-0.03))),
        "diff --suite wide.py",
        0,
        "",
    ),
    # What was removed is found; nothing is compared with a redefined case.
    (
        storing(case_hash="other", sessions=of_case(speed=faster(-0.5)).sessions),
        "diff --git main",
        0,
        "is new (the case was redefined: its old numbers are not compared)",
    ),
    (another(OTHER, gone=True), "diff --git main", 1, "worse: h200/1b-torchao-rowwise"),
    (removed("baselines"), "diff --git main", 1, "1 removed: h200/1b-torchao-rowwise"),
    (None, "diff --git=no-such-branch", 2, "cannot be read"),
]


@pytest.mark.parametrize(("change", "arguments", "code", "says"), COMMANDS)
def test_what_a_command_says_and_its_exit_code(run, project, change, arguments, code, says):
    if change is not None:
        change(project)
    seen, out, err = run(*arguments.split())
    assert says in " ".join((out + err).split())
    assert seen == code
