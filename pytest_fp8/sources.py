"""Source text of functions as they stand in their files, through no decorator, and what they name and close over."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any


def source_of(function: types.FunctionType) -> str:
    """The function's own text, the decorators above it included; of a lambda that shares its lines with another, or has
    several, the expression alone. Where there is no file (``exec``), the constants and names of its code."""
    code = function.__code__
    try:
        text = inspect.getsource(code)
    except (OSError, TypeError, SyntaxError):
        return repr(
            [code.co_name, sorted(names_in(code)), [x for x in code.co_consts if isinstance(x, (int, str, float))]]
        )
    if code.co_name == "<lambda>":
        candidates = _lambdas("".join(inspect.findsource(code)[0])).get(code.co_firstlineno, [])
        alone = len(candidates) == 1 and candidates[0].end_lineno == code.co_firstlineno
        if candidates and not (alone and text.count("lambda") == 1):
            return ast.unparse(_that_holds(candidates, code))
    return text


def names_in(code: types.CodeType) -> set[str]:
    """Names in a function and in what is defined within it: up to Python 3.11 a comprehension is a function, too."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*(names_in(part) for part in inner))


def filled_cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over; a cell that is not filled yet holds nothing, and a method's class is no setting."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            if name != "__class__":
                yield name, cell.cell_contents


def is_local(value: Any) -> bool:
    """Whether a function was made by another one."""
    return isinstance(value, types.FunctionType) and "<locals>" in value.__code__.co_qualname


def is_generated(function: types.FunctionType) -> bool:
    """Whether a class decorator wrote it (a dataclass's ``__init__``), or wraps what one wrote."""
    seen = set()
    while id(function) not in seen and isinstance(vars(function).get("__wrapped__"), types.FunctionType):
        seen.add(id(function))
        function = vars(function)["__wrapped__"]
    return function.__code__.co_filename.startswith("<")


@functools.lru_cache(maxsize=16)
def _lambdas(text: str) -> dict[int, list[ast.Lambda]]:
    """The lambdas of a file's text, by the line on which they start."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found: dict[int, list[ast.Lambda]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


def _that_holds(candidates: list[ast.Lambda], code: types.CodeType) -> ast.Lambda:
    """The smallest of them in which all of the code's instructions lie; where these have no places (a constant, from
    Python 3.12 on), the one with its constants."""
    places = list(_places(code))
    holding = [
        node
        for node in candidates
        if all((node.lineno, node.col_offset) <= p < (node.end_lineno, node.end_col_offset) for p in places)
    ]
    if not places:
        holding = [node for node in candidates if _constants(node) == code.co_consts]
    return min(holding or candidates, key=lambda node: len(ast.unparse(node)))


def _constants(node: ast.Lambda) -> tuple[Any, ...]:
    """The constants of the lambda's code, were it compiled alone."""
    whole = compile(ast.Expression(node), "", "eval")
    return next(part.co_consts for part in whole.co_consts if isinstance(part, types.CodeType))


def _places(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """(line, column) of the instructions; those without a column of their own belong to the whole."""
    for line, _, column, end in code.co_positions():
        if line is not None and column is not None and (column, end) != (0, 0):
            yield line, column
