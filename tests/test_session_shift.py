"""Session-wide shifts: told from a case's own change, by simulation, in words and in the closing summary."""

from __future__ import annotations

import math

import numpy as np
import pytest

from helpers.told import Told
from pytest_fp8.codes import S
from pytest_fp8.report.shift import shift_lines, shift_of, shift_to_json
from pytest_fp8.stats.session_shift import ALPHA, Moved, session_shift, words
from pytest_fp8.verdicts import Decision, Verdict

OWN, SESSIONS = 0.0022, 0.0038
"""Standard errors of a change with four sessions stored: of its processes, and of sessions."""
ERROR = math.hypot(OWN, SESSIONS)


def changes(rng, common=0.0, cases=14, own=(), spread=OWN):
    values = common + rng.normal(0, spread, cases)
    values[: len(own)] += own
    return {f"case {index}": Moved(float(x), ERROR, OWN) for index, x in enumerate(values)}


def shifts(repeats=400, **how):
    rng = np.random.default_rng(1)
    return [session_shift(changes(rng, **how)) for _ in range(repeats)]


@pytest.mark.parametrize("cases", [4, 14])
def test_a_session_that_did_not_move_is_rarely_called_moved(cases):
    found = shifts(repeats=4000, cases=cases)
    assert 0.001 < np.mean([shift.moved for shift in found]) <= ALPHA
    assert 0.001 < np.mean([bool(shift.own) for shift in found]) <= ALPHA
    assert not any(shift.unusual for shift in found)


def test_a_shift_of_all_cases_is_found_with_its_size():
    found = shifts(common=-0.013)
    assert all(shift.unusual for shift in found)
    assert np.mean([abs(shift.common + 0.013) <= shift.half_width for shift in found]) >= 0.98
    assert np.mean([bool(shift.own) for shift in found]) <= 0.02


def test_what_sessions_usually_differ_by_is_a_shift_and_no_unusual_one():
    found = shifts(common=-0.004)
    assert np.mean([shift.moved for shift in found]) > 0.9
    assert not any(shift.unusual for shift in found)


@pytest.mark.parametrize("common", [0.0, -0.013])
def test_cases_that_moved_by_themselves_are_named_and_do_not_move_the_rest(common):
    found = shifts(common=common, own=(-0.02, -0.03))
    assert np.mean([set(shift.own) == {"case 0", "case 1"} for shift in found]) > 0.9
    assert np.mean([shift.common for shift in found]) == pytest.approx(common, abs=0.001)


def test_three_cases_tell_no_common_shift():
    assert session_shift(changes(np.random.default_rng(0), cases=3)) is None


def test_words_tell_a_host_s_shift_from_a_case_s_own():
    rng = np.random.default_rng(2)
    shift = session_shift(changes(rng, common=-0.013, own=(-0.03,)))
    said = "\n".join(words(shift, {"case 0": -0.043, "case 3": -0.014}))
    assert "all 14 gated cases moved by -1." in said
    assert "the host, its driver or a library, not one case" in said
    assert "case 3 -1.4% failed and moved like the rest" in said
    assert "case 0 -" in said
    assert "its own change" in said
    assert "failed and moved" not in "\n".join(words(shift, {}))
    usual = session_shift(changes(rng))
    assert words(usual, {}) == []
    assert words(usual, {"case 3": -0.03}) == [], "nothing moved that this case could have moved with"
    alone = session_shift(changes(rng, own=(-0.03,)))
    [line] = words(alone, {})
    assert line.startswith("not failed, and moved by itself: case 0 -")


def told(change, cases=6):
    noted = Told()
    for index in range(cases):
        numbers = {"change": change + 0.0005 * (index - cases / 2), "change_error": ERROR, "own_error": OWN}
        verdict = Verdict.FAIL if index == 0 else Verdict.PASS
        noted.answer(
            f"n{index}",
            Decision(
                None if verdict is Verdict.PASS else S.UNDECIDED, verdict, "x", figures=numbers, question="speedup"
            ),
        )
    return noted


def test_the_record_gives_lines_and_a_report():
    noted = told(-0.02)
    [first, following, failed] = shift_lines(noted)
    assert first.startswith("all 6 gated cases moved by -2.0% +-")
    assert "next:" in following
    assert "n0" in failed
    assert "moved like the rest" in failed
    assert shift_to_json(noted)["unusual"] is True
    assert shift_lines(told(0.0)) == []


def test_what_is_gated_on_busy_time_does_not_count():
    """Its sessions differ by how long hosts let the GPU wait, which is nothing that all cases share."""
    noted = told(0.0, cases=6)
    waiting = noted.entries["n5"].decisions["speedup"]["numbers"]
    waiting["change"] = 0.03
    assert "n5" in shift_of(noted).own
    waiting["on_busy"] = True
    assert shift_of(noted).cases == 5
    assert not shift_of(noted).own


def test_what_was_disturbed_or_had_no_baseline_does_not_count():
    noted = told(-0.02, cases=4)
    [row, *_] = noted.entries
    noted.answer(
        row,
        Decision(
            S.OTHER_PROCESS,
            Verdict.INVALID,
            "x",
            figures=noted.entries[row].decisions["speedup"]["numbers"],
            question="speedup",
        ),
    )
    assert shift_of(noted) is None
    assert shift_to_json(noted) is None
