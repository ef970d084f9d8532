"""What a collected test asks: its case and its question, or nothing; and the order in which tests are best asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.case import Case
    from pytest_fp8.options import Settings

FIXTURES = {"fp8_case", "fp8_pair", "fp8_check", "bf16_model", "fp8_model"}
"""Fixtures that need a case."""
SCRIPT = "fp8_script"
CHECKS = ("fp8_check", SCRIPT)
"""The fixtures that make a test of each question."""


def questions_of(case: Case) -> list[str]:
    """What :data:`CHECKS` ask of a case, by the names of ``assert_...()``: a speed is held against BF16's, too."""
    return [each for asked in case.questions for each in (["faster", "speedup"] if asked == "speedup" else [asked])]


def question_of(item: pytest.Item) -> str | None:
    """The question that a test is made for, or that its marks name, the nearest one first; ``None`` where any may be
    asked."""
    if checked := checked_by(item):
        return "speedup" if checked == "faster" else checked
    named = (mark.kwargs["question"] for mark in item.iter_markers("fp8") if "question" in mark.kwargs)
    return next(named, None)


def case_of(item: pytest.Item) -> Any:
    """The case a test was parametrised with, or ``None``: also where the list was empty, which pytest skips."""
    callspec = getattr(item, "callspec", None)
    given = callspec.params.get("fp8_case") if callspec is not None else None
    if given is None:
        return None
    from pytest_fp8.case import Case

    return given if isinstance(given, Case) else None


def checked_by(item: pytest.Item) -> str:
    """The question of a test with one of the fixtures :data:`CHECKS`; empty for others."""
    callspec = getattr(item, "callspec", None)
    asked = [callspec.params[name] for name in CHECKS if name in callspec.params] if callspec is not None else []
    return str(asked[0]) if asked else ""


def can_be_asked(item: pytest.Item) -> bool:
    """False for a test of a question that its case does not answer, where others of its function's cases do."""
    checked, case = checked_by(item), case_of(item)
    return not checked or case is None or checked in questions_of(case)


def in_order(items: list[pytest.Item]) -> None:
    """Bring the tests of one case together, and the cases of one reference, in place; other tests keep their places.

    pytest groups parametrised tests by a parameter's position in each test's own list, which is not the same case in
    tests that ask different questions. Built once and asked everything, a pair costs a fifth.
    """
    from pytest_fp8.case import QUESTIONS

    slots = [index for index, item in enumerate(items) if case_of(item) is not None]
    mine = [items[index] for index in slots]
    references: dict[str, int] = {}
    cases: dict[str, int] = {}
    for item in mine:
        case = case_of(item)
        references.setdefault(case.reference().id, len(references))
        cases.setdefault(case.id, len(cases))

    def rank(item: pytest.Item) -> tuple[int, int, int]:
        case = case_of(item)
        question = question_of(item)
        asked = QUESTIONS.index(question) if question in QUESTIONS else len(QUESTIONS)
        return references[case.reference().id], cases[case.id], asked

    for index, item in zip(slots, sorted(mine, key=rank), strict=True):
        items[index] = item


def check_mark(item: pytest.Item, settings: Settings) -> None:
    """Complain of a mark that nothing reads: one of the test's own without a fixture for it, or one on a parameter. A
    mark of a class or a module is for those of its tests that need it."""
    callspec = getattr(item, "callspec", None)
    on_parameter = any(mark.name == "fp8" for mark in getattr(callspec, "marks", ()))
    own = any(mark.name == "fp8" for mark in item.own_markers)
    if not on_parameter and (not own or FIXTURES & set(getattr(item, "fixturenames", FIXTURES))):
        return
    error = Fp8Error(
        R.MARK_UNREAD,
        f"{item.name} has a mark fp8 that is not read",
        expected=f"a mark on the test's function, class or module, and one of {', '.join(sorted(FIXTURES))} among its "
        "arguments",
        seen="the mark on a parameter, pytest.param(..., marks=...)" if on_parameter else "none of these arguments",
        cause="the mark names the case, and the fixture runs it; marks of parameters come too late for that",
        next_step=f"def {getattr(item, 'originalname', item.name)}(fp8_pair): fp8_pair.assert_loss(); for "
        "several cases a list in its mark, recipe=['tensorwise', 'rowwise']",
    )
    _complain(item, error, settings)


def check_pair(item: pytest.Item, settings: Settings) -> None:
    """Complain of a test that has passed and asked nothing of its pair."""
    pair = getattr(item, "funcargs", {}).get("fp8_pair")
    # A user's own fixture of that name notes nothing.
    if getattr(pair, "used", True):
        return
    error = Fp8Error(
        R.NOTHING_ASKED,
        f"{item.name} takes fp8_pair and asks nothing of it",
        expected="a question, such as fp8_pair.assert_layers() or fp8_pair.assert_loss()",
        seen="both arms were built, and nothing was asked of them",
        cause="a test passes where it asserts nothing, also where the parentheses of a question are missing",
        next_step="fp8_pair.assert_layers(); or take fp8_pair out of the test's arguments",
    )
    _complain(item, error, settings)


def _complain(item: pytest.Item, error: Fp8Error, settings: Settings) -> None:
    """Warn at the test; under ``--fp8-strict`` and on a declared GPU fail it: a gate that asks nothing is not green."""
    import pytest

    if settings.strict or settings.declared:
        pytest.fail(error.message, pytrace=False)
    item.warn(pytest.PytestWarning(error.message))
