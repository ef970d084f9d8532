"""What a collected test asks: its case and its question, or nothing; and the order in which tests are best asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_fp8.case import Case
    from pytest_fp8.codes import Code
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.options import Settings

FIXTURES = {"fp8_case", "fp8_pair", "fp8_check", "bf16_model", "fp8_model"}
"""Fixtures that need a case."""
SCRIPT = "fp8_script"
CHECKS = ("fp8_check", SCRIPT)
"""The fixtures that make a test of each question."""


def wants_fp8(metafunc: pytest.Metafunc) -> bool:
    """Whether a test takes one of this plugin's fixtures, or has its mark."""
    taken = {*FIXTURES, SCRIPT} & {*metafunc.fixturenames}
    return bool(taken) or any(metafunc.definition.get_closest_marker(name) for name in ("fp8", SCRIPT))


def parametrize(metafunc: pytest.Metafunc, settings: Settings) -> None:
    """Make a test of each case of the marks, and with one of :data:`CHECKS` of each question: known from collection on,
    so that ``-k`` finds it by its name."""
    from pytest_fp8.errors import Fp8Error
    from pytest_fp8.markers import cases_of
    from pytest_fp8.script.command import of_mark

    test, taken = metafunc.definition, {*metafunc.fixturenames}
    cases: list[Case] = []
    try:
        if SCRIPT in taken:
            marked = of_mark(test)
            cases = [marked[1]] if marked is not None else []
        elif FIXTURES & taken and (marks := list(test.iter_markers_with_node("fp8"))):
            cases = cases_of(test.nodeid, marks, settings)
    except Fp8Error as error:
        raise failed(error) from None
    if not cases:
        return
    metafunc.parametrize("fp8_case", cases, indirect=True, ids=[case.id for case in cases], scope="session")
    for check in taken.intersection(CHECKS):
        questions = dict.fromkeys(question for case in cases for question in questions_of(case))
        metafunc.parametrize(check, list(questions), indirect=True)


def failed(error: Fp8Error) -> BaseException:
    """What a hook or a fixture raises for it: pytest.fail() would raise with this error as its context, and pytest
    would show both."""
    return pytest.fail.Exception(error.message, pytrace=False)


def questions_of(case: Case) -> list[str]:
    """What :data:`CHECKS` ask of a case, by the names of ``assert_...()``: a speed is held against BF16's, too."""
    return [each for asked in case.questions for each in (["faster", "speedup"] if asked == "speedup" else [asked])]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


def case_of(item: pytest.Item) -> Any:
    """The case a test was parametrised with, or ``None``: also where the list was empty, which pytest skips."""
    given = _parameters(item).get("fp8_case")
    if given is None:
        return None
    from pytest_fp8.case import Case

    return given if isinstance(given, Case) else None


def _checked_by(item: pytest.Item) -> str:
    """The question of a test with one of the fixtures :data:`CHECKS`; empty for others."""
    return next((str(asked) for name, asked in _parameters(item).items() if name in CHECKS), "")


def question_of(item: pytest.Item) -> str | None:
    """The question that a test is made for, or that its marks name, the nearest one first; ``None`` where any may be
    asked."""
    if checked := _checked_by(item):
        return "speedup" if checked == "faster" else checked
    return next((mark.kwargs["question"] for mark in item.iter_markers("fp8") if "question" in mark.kwargs), None)


def arrange(items: list[pytest.Item]) -> None:
    """In place: leave out tests of a question that their case does not answer, where others of the function's cases do.
    Bring the tests of one case together, and the cases of one reference; other tests keep their places.

    pytest groups parametrised tests by a parameter's position in each test's own list, which is not the same case in
    tests that ask different questions. Built once and asked everything, a pair costs a fifth.
    """
    from pytest_fp8.case import QUESTIONS

    cases = {item: case for item in items if (case := case_of(item)) is not None}
    items[:] = [i for i in items if i not in cases or _checked_by(i) in ("", *questions_of(cases[i]))]
    references: dict[str, int] = {}
    places: dict[str, int] = {}

    def rank(item: pytest.Item) -> tuple[int, int, int]:
        question = question_of(item)
        asked = QUESTIONS.index(question) if question in QUESTIONS else len(QUESTIONS)
        return references[cases[item].reference().id], places[cases[item].id], asked

    slots = [index for index, item in enumerate(items) if item in cases]
    for index in slots:
        case = cases[items[index]]
        references.setdefault(case.reference().id, len(references))
        places.setdefault(case.id, len(places))
    for index, item in zip(slots, sorted((items[index] for index in slots), key=rank), strict=True):
        items[index] = item


def check_mark(item: pytest.Item, settings: Settings) -> None:
    """Complain of a mark that nothing reads: one of the test's own without a fixture for it, or one on a parameter. A
    mark of a class or a module is for those of its tests that need it."""
    for name, fixtures in (("fp8", FIXTURES), (SCRIPT, {SCRIPT})):
        on_parameter = any(mark.name == name for mark in getattr(getattr(item, "callspec", None), "marks", ()))
        own = any(mark.name == name for mark in item.own_markers)
        if not on_parameter and (not own or fixtures & set(getattr(item, "fixturenames", fixtures))):
            continue
        from unittest import TestCase

        from pytest_fp8.codes import R

        of_unittest = issubclass(getattr(item, "cls", None) or object, TestCase)
        seen = "a method of a unittest.TestCase, which pytest gives no fixtures" if of_unittest else "none of these"
        _complain(
            item,
            settings,
            R.MARK_UNREAD,
            f"{item.name} has a mark {name} that is not read",
            expected=f"a mark on the test's function, class or module, and {' or '.join(sorted(fixtures))} among its "
            "arguments",
            seen="the mark on a parameter, pytest.param(..., marks=...)" if on_parameter else seen,
            cause="the mark names the case, and the fixture runs it; marks of parameters come too late for that",
        )


def check_pair(item: pytest.Item, settings: Settings) -> None:
    """Complain of a test that has passed and asked nothing of its pair."""
    # A user's own fixture of that name notes nothing.
    if getattr(getattr(item, "funcargs", {}).get("fp8_pair"), "used", True):
        return
    from pytest_fp8.codes import R

    _complain(
        item,
        settings,
        R.NOTHING_ASKED,
        f"{item.name} takes fp8_pair and asks nothing of it",
        expected="a question, such as fp8_pair.assert_layers() or fp8_pair.assert_loss()",
        seen="both arms were built, and nothing was asked of them",
        cause="a test passes where it asserts nothing, also where the parentheses of a question are missing",
    )


def _complain(item: pytest.Item, settings: Settings, code: Code, headline: str, **lines: str) -> None:
    """Warn at the test; under ``--fp8-strict`` and on a declared GPU fail it: a gate that asks nothing is not green."""
    from pytest_fp8.errors import Fp8Error

    error = Fp8Error(code, headline, **lines)
    if settings.strict or settings.declared:
        raise failed(error)
    item.warn(pytest.PytestWarning(error.message))
