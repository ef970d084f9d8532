"""The table of cases: the same cells on the terminal, in Markdown and on the page; and the notes below it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from helpers.records import HOSTILE, Told, case_of, report_of, said
from pytest_fp8.codes import D, N, R, S
from pytest_fp8.errors import Fp8Error
from pytest_fp8.report.rows import Answer, Row
from pytest_fp8.report.table import COLUMNS, cell_of, gap_of, markdown
from pytest_fp8.report.terminal import findings, footnotes, marked, passed_without, remarks, summary, unanswered
from pytest_fp8.verdicts import Decision, Verdict

FIGURES = {
    "layers": {"converted": 112, "linears": 113, "fp8_share": 0.787, "skipped": {"head: output projections": 1}},
    "numerics": {"gradient_error": 0.19},
    "loss": {"gap": 0.0040, "margin": 0.02},
    "speedup": {"speedup": 1.140, "low": 1.122, "high": 1.158, "baseline": 1.143},
    "memory": {"ratio": 0.85, "baseline": 0.86},
    "checkpoints": {},
}
"""Question -> what a case on a GPU says."""


def one(question, verdict="PASS", **numbers):
    return Row("c", [said(question, verdict, **numbers)])


@pytest.mark.parametrize("question", FIGURES)
@pytest.mark.parametrize("verdict", ["INVALID", "PASS"])
def test_an_answer_without_figures_or_with_words_in_their_place_has_a_cell(question, verdict):
    for numbers in ({}, dict.fromkeys(FIGURES[question], "x"), {name: [1] for name in FIGURES[question]}):
        assert cell_of(one(question, verdict, **numbers), question).verdict == verdict


@pytest.mark.parametrize(
    ("question", "verdict", "high", "known", "shown"),
    [
        ("speedup", "PASS", 0.70, False, ("0.676x (none) slower", "magenta")),
        ("faster", "FAIL", 0.70, True, ("0.676x (none) slower", "magenta")),
        ("faster", "FAIL", 0.70, False, ("0.676x (none) FAIL", "red")),
        ("faster", "FAIL", 1.02, True, ("0.676x (none) known", "yellow")),
        ("speedup", "FAIL", 0.70, False, ("0.676x (none) FAIL", "red")),
        ("speedup", "INVALID", 0.70, False, ("0.676x (none) invalid", "yellow")),
        ("speedup", "PASS", 1.02, False, ("0.676x (none)", "green")),
    ],
)
def test_what_passes_and_is_slower_than_bf16_is_not_green(question, verdict, high, known, shown):
    answer = said(question, verdict, speedup=0.676, low=0.652, high=high)
    row = Row("c", [replace(answer, known=known)])
    assert marked(row, "speedup") == shown


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"gradient_error": 0.19, "gain_error": 0.2, "products": 9}, "19.0%"),
        ({"gradient_error": None, "gain_error": 0.28, "products": 9}, "factor 1+-0.28"),
        ({"products": 9}, "9 products"),
        ({}, "-"),
    ],
)
def test_gradients_are_told_as_far_as_they_were_compared(numbers, text):
    assert cell_of(one("numerics", **numbers), "numerics").text == text


@pytest.mark.parametrize(
    ("gap", "margin", "shown"),
    [
        (-0.0147, 0.05, "-0.0147 (<0.050)"),
        (0.00139, 0.00126, "+0.0014 (<0.0013)"),
        (0.0208, 0.0206, "+0.0208 (<0.0206)"),
        (0.00004, 0.0000137, "+4e-05 (<1.4e-05)"),
    ],
)
def test_a_gap_and_its_margin_are_rounded_alike(gap, margin, shown):
    assert gap_of({"gap": gap, "margin": margin}) == shown


@pytest.mark.parametrize("margin", [0.00126, 0.0099501, 0.02, 0.0206, 0.04996, 1.23456, 0.0009996])
@pytest.mark.parametrize("above", [1.000001, 1.001, 1.1])
def test_a_gap_above_the_margin_is_never_shown_below_it(margin, above):
    gap, _, shown = gap_of({"gap": margin * above, "margin": margin}).partition(" (<")
    assert float(gap) >= float(shown.rstrip(")"))


def answered(*questions, case="tiny-torchao-tensorwise", gpu="h200"):
    told = Told()
    told.case(case, gpu=gpu)
    for question in questions:
        told.answer(case, Decision(None, Verdict.PASS, "x", question=question, figures=FIGURES[question]))
    return told


def test_a_case_that_is_asked_everything_has_one_line_of_100_columns_of_any_encoding():
    drawn = summary(answered(*FIGURES), color=False)
    assert max(map(len, drawn.splitlines())) <= 100
    assert drawn.isascii()
    assert drawn.splitlines()[-1].split() == [
        *("tiny-torchao-tensorwise", "112/113", "78.7%", "19.0%", "+0.0040", "(<0.020)"),
        *("1.140x", "(1.143)", "0.85x", "yes"),
    ]
    narrow = summary(answered(*FIGURES), color=False, width=80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_what_was_not_asked_has_no_column():
    told = answered("layers", "numerics", "loss", case="own-emulated", gpu="emulated")
    assert not {"speedup", "memory"} & {*summary(told, color=False).split()}
    assert remarks(told) == [
        "no case has an answer to: checkpoints; speedup and memory need a GPU",
        "left in BF16: head (output projections)",
    ]
    assert "switch back" not in markdown(report_of(case_of("c", said("loss"))))


def test_notes_are_numbered_and_one_of_several_cases_is_said_once():
    told = answered("layers", case="a")
    numbers = {**FIGURES["layers"], "notes": ["2 of 3 Linears stay in BF16"]}
    for case in ("a", "b"):
        told.notes.begin(f"test_{case}")
        told.answer(case, Decision(None, Verdict.PASS, "", question="layers", figures=numbers))
    told.answer("b", Decision(S.OTHER_PROCESS, Verdict.INVALID, "disturbed", question="speedup"))
    told.ended("test_a", "a", "known", "a library's defect")
    told.error("b", Fp8Error(R.ARM_DIED, "the arm 'fp8' died"))
    notes = footnotes(told)
    assert list(notes.items()) == [
        ("fails as known: a library's defect", ["a"]),
        ("2 of 3 Linears stay in BF16", ["a", "b"]),
        ("FP8-R05: the arm 'fp8' died", ["b"]),
        ("b speedup: INVALID FP8-S13: disturbed", ["b"]),
    ]
    rows = summary(told, color=False, width=200, notes=notes).splitlines()[3:]
    assert [re.split(" {2,}", row.strip())[0] for row in rows] == ["a [1] [2]", "b [2] [3] [4]"]


def test_what_several_questions_share_is_said_once_with_their_names():
    shared = [Decision(D.OTHER_RANDOM_NUMBERS, Verdict.INVALID, "other draws", question=q) for q in ("layers", "loss")]
    told = Told()
    for decision in [*shared, Decision(N.TOO_SENSITIVE, Verdict.INCONCLUSIVE, "too sensitive", question="numerics")]:
        told.answer("c", decision)
    assert findings(told.entries["c"]) == [
        "c layers, loss: INVALID FP8-D15: other draws",
        "c numerics: INCONCLUSIVE FP8-N23: too sensitive",
    ]


def test_the_summary_has_a_row_per_case_the_worst_first_and_says_what_to_do():
    failed = said("faster", "FAIL", "FAIL: slow\n  cause:    a cast\n  next:     fuse it", speedup=0.9)
    noted = [said(question, notes=["2 of 3 Linears stay in BF16"]) for question in ("layers", "numerics")]
    text = markdown(report_of(case_of("fine", *noted), case_of("slow", failed)))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| case | verdict | FP8 layers")
    assert rows[2].startswith("| slow | FAIL | - |")
    assert "| **FAIL** 0.900x (none) |" in rows[2]
    assert rows[3].startswith("| fine | PASS |")
    assert "next:     fuse it" in text
    assert text.count("\nfine: 2 of 3 Linears stay in BF16\n") == 1


def test_hostile_text_breaks_no_row_and_is_no_html():
    text = markdown(
        report_of(case_of("a", said("faster", "FAIL", HOSTILE), said("layers", "ERROR", "x | y\n# z <b> @all")))
    )
    assert "<script" not in text
    assert "<b>" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| ")}) == 1


# -- questions without an answer on a declared GPU --------------------------------------------------------------------


def judged(*verdicts, in_ci=False, missing=0):
    answers = [Answer("", f"case{i}", "", "loss", verdict, headline="why") for i, verdict in enumerate(verdicts)]
    answers += [Answer("", f"new{i}", "", "speedup", "NOT_EXERCISED", S.NO_BASELINE, "none") for i in range(missing)]
    return unanswered(answers, gpu="h200", in_ci=in_ci)


@pytest.mark.parametrize("verdict", ["INVALID", "NOT_EXERCISED"])
def test_one_question_that_was_not_answered_fails_and_is_listed(verdict):
    assert judged("PASS", "FAIL", "IMPROVED") == ([], [])
    [problem], _ = judged("PASS", verdict)
    assert f"case1 loss: {verdict}: why" in problem
    assert "1 of 2 questions" in problem


@pytest.mark.parametrize(("asked", "allowed"), [(2, 1), (39, 1), (40, 2), (100, 5)])
def test_some_may_be_inconclusive_and_no_more(asked, allowed):
    for undecided in (allowed, allowed + 1):
        problems, _ = judged(*["INCONCLUSIVE"] * undecided, *["PASS"] * (asked - undecided))
        assert bool(problems) is (undecided > allowed)
    assert f"{allowed + 1} INCONCLUSIVE where {allowed} may be" in problems[0]


def test_a_missing_baseline_fails_in_ci_alone():
    assert judged("PASS", missing=3)[0] == []
    [note] = judged("PASS", missing=3)[1]
    assert "3 case(s)" in note
    assert "--fp8-update" in note
    assert judged("PASS", missing=3, in_ci=True) == ([note], [])


def test_without_a_declared_gpu_a_note_says_how_many_tests_pass_without_an_answer():
    def notes(*verdicts):
        return passed_without([Answer("", "case", "", "loss", verdict, headline="why") for verdict in verdicts])

    assert notes("PASS", "FAIL", "IMPROVED") == []
    [note] = notes("PASS", "INVALID", "NOT_EXERCISED", "INCONCLUSIVE")
    assert note.startswith("3 of 4 questions have no answer")


def test_each_question_has_a_column_that_says_how_to_read_it():
    assert list(COLUMNS) == list(FIGURES)
    assert all(column.reads for column in COLUMNS.values())
