"""The closing table, and the numbered notes below it: decisions that neither passed nor failed, and errors."""

from __future__ import annotations

import re

import pytest

from helpers.evidence import CASE
from helpers.told import Told
from pytest_fp8.codes import D, N, R, S
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.cells import COLUMNS, cells_of, gap_of
from pytest_fp8.report.footnotes import findings, footnotes, lines_of
from pytest_fp8.report.terminal import summary
from pytest_fp8.verdicts import Decision, Verdict

SPEED = {"speedup": 1.155, "low": 1.128, "high": 1.182, "baseline": 1.149}
NAMES = (
    "1b-torchao-tensorwise",
    "8b-te-delayed-lora16",
    "micro-trainer.torchao-tensorwise-fp8_all_gather.False-emulated",
)
KNOWN = "accelerate 1.15.0: wraps weights into parameters that the optimizer never gets, and says nothing of it at all"


@pytest.fixture
def told():
    """Three cases: of one the speed is invalid; of the others the loss fails as known, and an arm of one failed."""
    told = Told()
    loss = Decision(None, Verdict.PASS, "", figures={"gap": 0.0038, "margin": 0.02}, question="loss")
    for name in NAMES:
        told.answer(name, loss)
    disturbed = ("disturbed by another process", "none", "pid 4242", "a neighbour", "pytest " + "-k something " * 9)
    told.answer(NAMES[1], Decision(S.OTHER_PROCESS, Verdict.INVALID, *disturbed, figures=SPEED, question="speedup"))
    for name in (NAMES[0], NAMES[2]):
        told.ended(f"test_{name}", name, "known", KNOWN)
    told.error(NAMES[2], Fp8Error(R.ARM_DIED, "the arm 'fp8' died"))
    return told


def test_what_several_questions_share_is_said_once_with_their_names():
    told, row = Told(), CASE.id
    for question in ("layers", "loss"):
        told.answer(
            row,
            Decision(D.OTHER_RANDOM_NUMBERS, Verdict.INVALID, "the arms draw other random numbers", question=question),
        )
    told.answer(row, Decision(N.TOO_SENSITIVE, Verdict.INCONCLUSIVE, "too sensitive", question="numerics"))
    told.answer(row, Decision(None, Verdict.PASS, "0.9x", question="memory"))
    assert findings(told.entries[row]) == [
        f"{row} layers, loss: INVALID FP8-D15: the arms draw other random numbers",
        f"{row} numerics: INCONCLUSIVE FP8-N23: too sensitive",
    ]


def test_notes_are_numbered_and_one_of_several_cases_is_said_once(told):
    notes = footnotes(told)
    rows = summary(told, color=False, width=200, notes=notes).splitlines()[3:]
    assert [re.split(" {2,}", row.strip())[0] for row in rows] == [
        f"{NAMES[0]} [1]",
        f"{NAMES[1]} [2]",
        f"{NAMES[2]} [1] [3]",
    ]
    below = lines_of(list(notes), width=None)
    assert [line for line in below if line.startswith("[")] == [
        f"[1] fails as known: {KNOWN}",
        f"[2] {NAMES[1]} speedup: INVALID FP8-S13: disturbed by another process",
        "[3] FP8-R05: the arm 'fp8' died",
    ]


def test_an_error_that_pytest_has_shown_is_not_said_again(told):
    told.error(NAMES[2], Fp8Error(R.ARM_DIED, "the arm 'fp8' died"), ended="failed")
    told.error(NAMES[2], Fp8Error(R.ARM_HUNG, "a caught one"))
    below = lines_of(list(footnotes(told)), width=None)
    assert [line for line in below if line.startswith(("[3]", "[4]"))] == [
        "[3] FP8-R05: see above",
        "[4] FP8-R06: a caught one",
    ]


SIZES = "2 of 3 Linears stay in BF16: 0: out_features=250 is not a multiple of 16"


def test_what_a_pass_names_is_a_note_that_equal_rows_share():
    told = Told()
    numbers = {"converted": 1, "linears": 3, "fp8_share": 0.18, "notes": [SIZES]}
    for name in NAMES[:2]:
        told.answer(name, Decision(None, Verdict.PASS, "", figures=numbers, question="layers"))
    told.answer(NAMES[2], Decision(None, Verdict.PASS, "", figures={**numbers, "notes": []}, question="layers"))
    notes = footnotes(told)
    assert notes == {SIZES: list(NAMES[:2])}
    assert f"{NAMES[1]} [1]" in summary(told, color=False, notes=notes)
    assert lines_of(list(notes), None) == [f"[1] {SIZES}"]


@pytest.mark.parametrize("width", [80, 100])
def test_table_and_notes_fit_a_terminal_and_lose_nothing(told, width):
    notes = footnotes(told)
    wide, narrow = (summary(told, color=False, width=each, notes=notes) for each in (None, width))
    below = lines_of(list(notes), width)
    too_wide = [line for line in [*wide.splitlines(), *narrow.splitlines(), *below] if len(line) > 100]
    assert [line.split()[0] for line in too_wide] == ["next:"], "a command stays in one piece"
    assert max(map(len, narrow.splitlines())) <= width
    assert " ".join(" ".join(below).split()) == " ".join(" ".join(lines_of(list(notes), None)).split())
    rows = narrow.splitlines()[3:]
    ends = narrow.splitlines()[1].index("and margin")
    folded = "".join(row[:ends].strip() for row in rows)
    assert folded.replace(" ", "") == "".join(
        name + marks for name, marks in zip(NAMES, ("[1]", "[2]", "[1][3]"), strict=True)
    )
    for figure in ("1.155x", "(1.149)", "invalid", "+0.0038", "(<0.020)"):
        assert any(figure in row for row in rows)


def test_what_fits_is_not_folded():
    told = Told()
    told.case("tiny")
    assert summary(told, color=False, width=150) == summary(told, color=False)


@pytest.mark.parametrize(
    ("gap", "margin", "shown"),
    [
        (0.0038, 0.02, "+0.0038 (<0.020)"),
        (-0.0147, 0.05, "-0.0147 (<0.050)"),
        (0.3, 0.25, "+0.3000 (<0.250)"),
        (0.00139, 0.00126, "+0.0014 (<0.0013)"),
        (0.0208, 0.0206, "+0.0208 (<0.0206)"),
        (0.0003, 0.00784, "+0.0003 (<0.0078)"),
        (0.00133, 0.0000137, "+0.0013 (<1.4e-05)"),
        (0.00004, 0.0000137, "+4e-05 (<1.4e-05)"),
    ],
)
def test_a_gap_and_its_margin_are_rounded_alike_in_table_and_summary(gap, margin, shown):
    told = Told()
    told.answer("own", Decision(None, Verdict.PASS, "", figures={"gap": gap, "margin": margin}, question="loss"))
    assert summary(told, color=False).endswith(f" {shown}")
    assert cells_of(told.to_json()["entries"]["own"])[[*COLUMNS].index("loss gap")] == shown


@pytest.mark.parametrize("margin", [0.00126, 0.0099, 0.0099501, 0.01, 0.02, 0.0206, 0.04996, 0.2, 1.23456, 0.0009996])
@pytest.mark.parametrize("above", [1.000001, 1.001, 1.01, 1.1])
def test_a_gap_above_the_margin_is_never_shown_below_it(margin, above):
    gap, _, shown = gap_of({"gap": margin * above, "margin": margin}).partition(" (<")
    assert float(gap) >= float(shown.rstrip(")"))
