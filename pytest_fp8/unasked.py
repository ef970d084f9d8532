"""Tests that ask nothing and would pass: a mark that no fixture reads, and a pair that nothing is asked of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.options import Settings

FIXTURES = {"fp8_case", "fp8_pair", "bf16_model", "fp8_model"}
"""Fixtures that need a case."""


def refuse_mark_of_param(item: pytest.Item) -> None:
    """Fail a test with a mark fp8 on one of its parameters: it would be lost."""
    marks = [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == "fp8"]
    if not marks:
        return
    import pytest

    given = ", ".join(f"{name}={value!r:.80}" for name, value in marks[0].kwargs.items())
    raise pytest.fail.Exception(
        Fp8Error(
            R.BAD_MARK,
            f"{item.name} has a mark fp8 on a parameter, which is not read",
            expected="marks fp8 on the test's function, class or module",
            seen=f"pytest.param(..., marks=pytest.mark.fp8({given}))",
            cause="pytest makes a test's cases before it knows the marks of its parameters",
            next_step="a list in the function's mark, @pytest.mark.fp8(recipe=['tensorwise', 'rowwise']), or a test "
            "for each, with a name= of its own where the models differ",
        ).message,
        pytrace=False,
    )


def unread_mark(item: pytest.Item) -> str:
    """What to say of a test with a mark of its own that no fixture reads, or an empty string. A mark of a class or a
    module is for those of its tests that need it."""
    marked = any(mark.name == "fp8" for mark in item.own_markers)
    if not marked or FIXTURES & set(getattr(item, "fixturenames", FIXTURES)):
        return ""
    return Fp8Error(
        R.MARK_UNREAD,
        f"{item.name} has a mark fp8 and takes no fixture that reads it",
        expected="one of " + ", ".join(sorted(FIXTURES)) + " among the test's arguments",
        seen="none of them: nothing is run in FP8",
        cause="the mark names the case, and the fixture runs it",
        next_step=f"def {getattr(item, 'originalname', item.name)}(fp8_pair): fp8_pair.assert_loss()",
    ).message


def unused_pair(item: pytest.Item) -> str:
    """What to say of a test that has passed and asked nothing of its pair, or an empty string."""
    pair = getattr(item, "funcargs", {}).get("fp8_pair")
    # A user's own fixture of that name notes nothing.
    if getattr(pair, "used", True):
        return ""
    return Fp8Error(
        R.NOTHING_ASKED,
        f"{item.name} takes fp8_pair and asks nothing of it",
        expected="a question, such as fp8_pair.assert_layers() or fp8_pair.assert_loss()",
        seen="both arms were built, and nothing was asked of them",
        cause="a test passes where it asserts nothing, also where the parentheses of a question are missing",
        next_step="fp8_pair.assert_layers(); or take fp8_pair out of the test's arguments",
    ).message


def complain(item: pytest.Item, message: str, settings: Settings) -> None:
    """Warn at the test; under ``--fp8-strict`` and on a declared GPU fail it: a gate that asks nothing is not green."""
    import pytest

    if settings.strict or settings.declared:
        pytest.fail(message, pytrace=False)
    item.warn(pytest.PytestWarning(message))
