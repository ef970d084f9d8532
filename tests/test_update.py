"""--fp8-update: what is rewritten, what is left to the byte."""

from __future__ import annotations

import pytest

from helpers.baselines import edit
from helpers.fakes import H200, SUITE, install
from helpers.sessions import FILE, sessions, update, with_baselines


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE)
    return pytester


@pytest.fixture
def stored(suite, monkeypatch):
    return with_baselines(suite, monkeypatch)


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


@pytest.mark.parametrize("change", [{"case_hash": "0" * 16}, {"schema": 1}], ids=["hash", "schema"])
def test_a_file_that_cannot_be_compared_with_is_replaced_whole(stored, change):
    edit(stored.path / FILE, lambda data: data.update(change), sign="digest" not in change)
    result = stored.runpytest(*update("redefined"))
    result.stdout.fnmatch_lines(["*tiny-torchao-rowwise is new (the earlier file cannot be compared with: *"])
    [session] = sessions(stored)
    assert session["reason"] == "redefined"


def test_an_update_that_no_commit_names_says_so(stored, monkeypatch):
    said = "*the sessions that were stored name no commit*"
    stored.runpytest(*update()).stdout.fnmatch_lines([said])
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    stored.runpytest(*update()).stdout.no_fnmatch_line(said)


def test_baselines_that_an_update_wrote_do_not_make_the_tree_dirty_and_code_does(stored, monkeypatch):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        assert stored.run(*git, *arguments).ret == 0
    install(monkeypatch, H200, speedup=1.1)
    for reason in ("both", "again"):
        assert stored.runpytest(*update(reason)).ret == 0
    [changed] = stored.path.glob("test_*.py")
    changed.write_text(changed.read_text() + "\n")
    assert stored.runpytest(*update("of changed code")).ret == 0
    written = [sessions(stored, path) for path in (stored.path / "baselines/h200").glob("*.json")]
    assert [[session["dirty"] for session in each[-3:]] for each in written] == [[False, False, True]] * 2
