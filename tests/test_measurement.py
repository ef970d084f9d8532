"""The way figures are taken: its number moves when the code that takes them does, or somebody says why not."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest

from pytest_fp8.measurement import MEASUREMENT, ONE_GPU, TAKEN_BY, TAKES_FIGURES, moved_by

PACKAGE = Path(__file__).parents[1] / "pytest_fp8"


def code_of(text):
    """The lines of a file without docstrings, comments of their own line, and blank lines."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    silent = {
        number
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    lines = [line.rstrip() for number, line in enumerate(text.splitlines(), 1) if number not in silent]
    return "\n".join(line for line in lines if line.strip() and not line.strip().startswith("#"))


def taken_by():
    texts = (f"{name}\n{code_of((PACKAGE / name).read_text())}" for name in TAKES_FIGURES)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def test_a_change_of_how_figures_are_taken_moves_the_number_or_is_recorded():
    assert taken_by() == TAKEN_BY, (
        f"the way figures are taken changed: raise MEASUREMENT ({MEASUREMENT}) in pytest_fp8/measurement.py where a "
        f"stored figure moves by it; then record the code that takes them: TAKEN_BY = {taken_by()!r}"
    )


def test_words_about_the_code_do_not_count():
    code = 'def f():\n    """Gives one."""\n    # Because.\n\n    return 1\n'
    assert code_of(code) == "def f():\n    return 1"
    assert code_of(code.replace("return 1", "return 2")) != code_of(code)


@pytest.mark.parametrize(
    ("number", "several", "by"),
    [
        (ONE_GPU, False, 0),
        (MEASUREMENT, False, 0),
        (ONE_GPU - 1, False, ONE_GPU),
        (MEASUREMENT, True, 0),
        (ONE_GPU, True, MEASUREMENT),
        (1, True, MEASUREMENT),
        (MEASUREMENT + 1, False, MEASUREMENT + 1),
        (MEASUREMENT + 1, True, MEASUREMENT + 1),
    ],
)
def test_a_change_of_what_several_gpus_tell_leaves_figures_of_one_as_they_are(number, several, by):
    assert moved_by(number, several) == by
