"""What a baseline's sessions are gated on: the newest values, a history from its level on, a revision's files."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import baseline
from helpers.good_baseline import GOOD, LATER, read
from pytest_fp8.baselines.check import measured_otherwise
from pytest_fp8.baselines.record import MEASUREMENT
from pytest_fp8.baselines.source import Folder, Revision
from pytest_fp8.baselines.store import baseline_path, held_against, write_baseline
from pytest_fp8.errors import BaselineError


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def test_values_are_those_of_the_newest_session_that_has_them():
    stored = replace(GOOD, sessions=(*GOOD.sessions, LATER))
    assert stored.values("fp8_share") == [0.8]
    assert stored.values("speedup") == [[0.1, 0.11], [0.12, 0.1]]
    assert stored.history("fp8_share") == [[0.78], [0.8]]


@pytest.mark.parametrize("busy", [True, False])
def test_an_update_is_held_against_nothing_and_knows_what_the_stored_one_is_gated_on(tmp_path, busy):
    speedup = {"speedup": [[0.1], [0.1]], "busy_speedup": [[0.2], [0.2]]}
    made = baseline("1b-te-block", "abc", metrics=speedup)
    made = replace(made, sessions=(*made.sessions[:-1], replace(made.newest, host_bound=busy)))
    write_baseline(tmp_path, made)
    assert made.gated == ("busy_speedup" if busy else "speedup")
    of_gate, of_update = (held_against(Folder(tmp_path), "h200", "1b-te-block", "abc", x) for x in (False, True))
    assert (of_gate, of_update) == ((made, busy), (None, busy))
    other_case = Folder(tmp_path), "h200", "1b-te-block", "defined anew"
    assert held_against(*other_case, update=True) == (None, False)
    with pytest.raises(BaselineError, match="definition"):
        held_against(*other_case, update=False)


@pytest.mark.parametrize("number", [MEASUREMENT - 1, MEASUREMENT, MEASUREMENT + 1])
def test_figures_that_were_taken_another_way_are_gated_on_and_told(number):
    stored = replace(GOOD, sessions=(replace(GOOD.newest, measurement=number),))
    assert stored.history("speedup")
    assert measured_otherwise(stored) is (number != MEASUREMENT)


def test_a_history_begins_where_its_level_does():
    starts = replace(LATER, starts=("fp8_share",))
    stored = replace(GOOD, sessions=(*GOOD.sessions, starts, replace(LATER, metrics={"fp8_share": [0.81]})))
    assert stored.history("fp8_share") == [[0.8], [0.81]]
    assert len(stored.history("speedup")) == 1


def test_baselines_are_read_from_a_revision_and_the_checkout_does_not_count(stored):
    (stored / "h200/_other.json").write_text("{}")
    git = ["git", "-C", str(stored), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    write_baseline(stored, replace(GOOD, case_hash="new"))
    assert read(Revision(stored, "main")) == GOOD
    assert read(Revision(stored, "main"), case="8b-te-block") is None
    assert Revision(stored, "main").names() == [baseline_path(Path(), "h200", GOOD.case)]
    assert Revision(stored, "main").text(Path("h200/_other.json")) == "{}", "beside the baselines, and none of them"
    baseline_path(stored, "h200", GOOD.case).unlink()
    baseline_path(stored, "h200", GOOD.case).symlink_to("/etc/passwd")
    for arguments in (["add", "."], ["commit", "-qm", "a link"]):
        subprocess.run([*git, *arguments], check=True)
    with pytest.raises(BaselineError, match="not a regular file"):
        read(Revision(stored, "HEAD"))
    for revision in ("nowhere", "--output=x"):
        with pytest.raises(BaselineError, match="cannot be read"):
            read(Revision(stored, revision))


def test_busy_times_of_a_quiet_host_are_no_older_than_the_level_of_step_time():
    """A gate's candidate has none: where its steps began a new level, the stored busy times are of the old one."""
    speedup, busy = {"speedup": [[0.1], [0.1]]}, {"busy_speedup": [[0.2], [0.2]]}
    first = replace(GOOD.newest, metrics={**speedup, **busy}, starts=())
    moved, again = replace(first, metrics=speedup, starts=("speedup",)), replace(first, metrics={**speedup, **busy})
    assert replace(GOOD, sessions=(first, moved)).history("busy_speedup") == []
    assert len(replace(GOOD, sessions=(first, moved, again)).history("busy_speedup")) == 1
    assert len(replace(GOOD, sessions=(first, again)).history("busy_speedup")) == 2
