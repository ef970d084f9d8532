"""What a collected test asks: its case and its question; and the order in which tests are best asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def question_of(item: pytest.Item) -> str | None:
    """The question that a test's marks name, the nearest one first; ``None`` where they name none."""
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


def paired(items: list[pytest.Item]) -> list[Any]:
    """The cases of the tests that ask both arms of one, in their order."""
    with_pair = (item for item in items if "fp8_pair" in getattr(item, "fixturenames", ()))
    return [case for item in with_pair if (case := case_of(item)) is not None]


def in_order(items: list[pytest.Item], largest_first: bool = False) -> None:
    """Bring the tests of one case together, and the cases of one reference, in place; other tests keep their places.
    ``largest_first``: the suite's large models before small ones and before own ones, where several workers share the
    cases: the last to be given out are then short.

    pytest groups parametrised tests by a parameter's position in each test's own list, which is not the same case in
    tests that ask different questions. Built once and asked everything, a pair costs a fifth.
    """
    from pytest_fp8.case import QUESTIONS
    from pytest_fp8.zoo.shapes import SHAPES

    slots = [index for index, item in enumerate(items) if case_of(item) is not None]
    mine = [items[index] for index in slots]
    references: dict[str, int] = {}
    cases: dict[str, int] = {}
    for item in mine:
        case = case_of(item)
        references.setdefault(case.reference().id, len(references))
        cases.setdefault(case.id, len(cases))

    def rank(item: pytest.Item) -> tuple[int, int, int, int]:
        case = case_of(item)
        shape = SHAPES.get(case.model) if largest_first else None
        question = question_of(item)
        asked = QUESTIONS.index(question) if question in QUESTIONS else len(QUESTIONS)
        return -(shape.parameters if shape else 0), references[case.reference().id], cases[case.id], asked

    for index, item in zip(slots, sorted(mine, key=rank), strict=True):
        items[index] = item
