"""The hook that pytest-fp8 calls: other plugins and a ``conftest.py`` implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from pytest_fp8.report.rows import Answer


def pytest_fp8_answer(config: pytest.Config, report: pytest.TestReport, answer: Answer) -> None:
    """A test was told an answer. Called in the process that writes the report: under pytest-xdist in the controller.
    ``report``: the test's, which carries the answer.

    Example, of a ``conftest.py``::

        def pytest_fp8_answer(answer):
            print(answer.case, answer.question, answer.verdict, answer.numbers)
    """
