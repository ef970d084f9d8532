"""The closing table: a row of each case, whatever its decisions hold; what was not asked, and what is left in BF16."""

from __future__ import annotations

import pytest

from helpers.told import Told
from pytest_fp8 import Verdict
from pytest_fp8.codes import R, S
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.cells import cells_of
from pytest_fp8.report.terminal import HEADS, remarks, row, summary
from pytest_fp8.verdicts import Decision

SPEEDUP = [*HEADS].index("speedup")
LEFT = {"head: output projections stay in high precision": 1}
FIGURES = {
    "layers": {"converted": 112, "linears": 113, "fp8_share": 0.787, "skipped": LEFT},
    "numerics": {"gradient_error": 0.19},
    "loss": {"gap": 0.0040, "margin": 0.02},
    "speedup": {"speedup": 1.140, "low": 1.122, "high": 1.158, "baseline": 1.143},
    "memory": {"ratio": 0.85},
    "checkpoints": {},
}
"""Question -> what a case on a GPU says."""


def entry_of(question, verdict, **numbers):
    code = None if verdict is Verdict.PASS else S.NO_BASELINE
    return Told().answer("c", Decision(code, verdict, "x", question=question, figures=numbers))


@pytest.mark.parametrize("question", ["layers", "speedup", "memory", "loss", "numerics"])
@pytest.mark.parametrize("verdict", [Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.PASS])
def test_a_decision_without_numbers_has_a_row(question, verdict):
    entry = entry_of(question, verdict)
    assert len(row(entry)) == len(HEADS)
    assert len(cells_of(vars(entry))) == 8


@pytest.mark.parametrize(
    ("question", "verdict", "high", "known", "says"),
    [
        ("speedup", Verdict.PASS, 0.70, ["faster"], "[magenta]0.676x (none) slower, known[/]"),
        ("speedup", Verdict.PASS, 0.70, [], "[magenta]0.676x (none) slower[/]"),
        ("faster", Verdict.FAIL, 0.70, ["faster"], "[magenta]0.676x (none) slower, known[/]"),
        ("faster", Verdict.FAIL, 0.70, [], "[red]0.676x (none) FAIL[/]"),
        ("speedup", Verdict.FAIL, 0.70, ["faster"], "[red]0.676x (none) FAIL[/]"),
        ("speedup", Verdict.INVALID, 0.70, ["faster"], "[yellow]0.676x (none) invalid[/]"),
        ("layers", Verdict.PASS, 0.70, ["faster"], "[magenta]slower, known[/]"),
        ("speedup", Verdict.PASS, 1.02, [], "[green]0.676x (none)[/]"),
    ],
)
def test_what_passes_and_is_slower_than_bf16_is_not_green(question, verdict, high, known, says):
    entry = entry_of(question, verdict, speedup=0.676, low=0.652, high=high)
    entry.known += known
    assert row(entry)[SPEEDUP] == says


def answered(*questions, case="tiny-torchao-tensorwise", gpu="h200"):
    told = Told()
    told.case(case, gpu=gpu)
    for question in questions:
        told.answer(case, Decision(None, Verdict.PASS, "x", question=question, figures=FIGURES[question]))
    return told


@pytest.mark.parametrize("width", [None, 100])
def test_a_case_that_is_asked_everything_has_one_line_of_100_columns(width):
    drawn = summary(answered(*FIGURES), color=False, width=width).splitlines()
    assert max(map(len, drawn)) <= 100
    assert drawn[-1].split() == [
        *("tiny-torchao-tensorwise", "112/113", "78.7%", "19.0%", "+0.0040", "(<0.020)"),
        *("1.140x", "(1.143)", "0.85x", "yes"),
    ]


def test_what_was_not_asked_has_no_column_and_is_named():
    told = answered("layers", "numerics", "loss", case="own-torchao-tensorwise-emulated", gpu="emulated")
    drawn = summary(told, color=False)
    assert max(map(len, drawn.splitlines())) <= 80
    assert "speedup" not in drawn
    assert "memory" not in drawn
    assert remarks(told)[0] == "not asked: checkpoints; speedup and memory need a GPU"


def test_a_question_without_an_answer_keeps_its_column():
    told = Told()
    told.answer("c", Decision(S.NO_BASELINE, Verdict.NOT_EXERCISED, "x", question="memory"))
    assert "memory" in summary(told, color=False)
    assert remarks(told) == ["not asked: layers, numerics, loss, speedup, checkpoints"]


def test_faster_fills_the_column_of_the_speedup():
    told = Told()
    told.answer("c", Decision(None, Verdict.PASS, "x", question="faster", figures={"speedup": 1.2}))
    assert "1.200x" in summary(told, color=False)
    assert "speedup" not in remarks(told)[0]


def test_a_row_whose_arms_failed_is_not_said_to_have_asked_nothing():
    told = answered("layers")
    told.error("tiny-torchao-tensorwise", Fp8Error(R.ARM_DIED, "the arm died"))
    assert remarks(told)[0].startswith("without an answer: numerics, loss, ")


def test_why_layers_are_left_in_bf16_is_said_once_below_the_table():
    told = answered("layers")
    told.add(answered("layers", case="8b-torchao-rowwise").to_lines())
    assert remarks(told)[1:] == ["left in BF16: head (output projections stay in high precision)"]
