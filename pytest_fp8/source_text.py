"""The source text of a workload's functions, for the hash of its case: comments, layout and docstrings do not count."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import sysconfig
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = f"{Path(__file__).parent}/"
"""This package's folder."""
SUITES = f"{OURS}shipped/"
"""Where a wheel has the suites."""
STDLIB = f"{sysconfig.get_path('stdlib')}/"


def text_of(value: Any) -> str:
    """A function, a callable object or a plain value as text, equal in every process, Python and checkout folder.

    - A function counts by its own syntax tree and those of what ``functools.wraps`` wrapped. What it calls or closes
      over does not count. The lambdas of one line that have equal arguments are told apart by their place.
    - A partial counts by its function and its plain arguments; an absolute path by its last part.
    - A class counts by its source; a bound method and a callable object by the source of the object's class.
    - What an installed library, the standard library or pytest-fp8 brings counts by its name, for its changes are what
      a baseline is held against. So does what has no source (``exec``).
    """
    if isinstance(value, str):
        return repr(os.path.basename(value) if os.path.isabs(value) else value)
    if value is None or isinstance(value, bool | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(text_of(entry) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, functools.partial):
        return " ".join(text_of(part) for part in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        return f"{value.__name__} of {text_of(value.__self__)}"
    wrapped = getattr(value, "__dict__", {}).get("__wrapped__")
    around = f" around {text_of(wrapped)}" if wrapped is not None else ""
    if isinstance(value, types.FunctionType):
        return _of_function(value) + around
    if isinstance(value, types.BuiltinFunctionType):
        return value.__qualname__
    return _of_class(value if isinstance(value, type) else type(value)) + around


def is_of_a_library(module: str) -> bool:
    """Whether a module is pytest-fp8's, Python's or an installed one."""
    origin = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in sys.stdlib_module_names or is_library_file(origin)


def is_library_file(file: str) -> bool:
    """Whether a file is pytest-fp8's, Python's or an installed one. Installed tests and the suites are still tests."""
    installed = "-packages" in file or file.startswith((OURS, STDLIB))
    return installed and not is_test_file(file) and not file.startswith(SUITES)


def is_test_file(origin: str) -> bool:
    """Whether a file is a test module or a conftest, by its name."""
    stem = os.path.splitext(os.path.basename(origin))[0]
    return stem == "conftest" or stem.startswith("test_")


def _of_class(kind: type) -> str:
    if is_of_a_library(kind.__module__):
        return kind.__qualname__
    try:
        return _canonical(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return kind.__qualname__


def _of_function(function: types.FunctionType) -> str:
    """The syntax tree of a function, found in its file by line and name: a lambda's own lines need not be Python."""
    code, held = function.__code__, function.__globals__
    # Not by __module__, which functools.wraps sets to that of what it wraps.
    if is_of_a_library(str(held.get("__name__", ""))):
        return function.__qualname__
    # A compiled file may have come with its folder from elsewhere, and then names a file that is not there.
    here = str(held.get("__file__", ""))
    path = here if os.path.basename(here) == os.path.basename(code.co_filename) else code.co_filename
    linecache.checkcache(path)
    found = [node for node in _functions("".join(linecache.getlines(path, held))) if _is(node, code)]
    if code.co_name == "<lambda>" and len(found) > 1:
        # The first thing that a lambda's body says is where some instruction of its own stands.
        places = {(line, column) for line, _, column, _ in code.co_positions()}
        found = [node for node in found if (node.body.lineno, node.body.col_offset) in places] or found
    return "; ".join(_canonical(node) for node in found) or function.__qualname__


def _is(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: types.CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min(part.lineno for part in (node, *node.decorator_list))
    return code.co_name == node.name and first == code.co_firstlineno


@functools.lru_cache(maxsize=16)
def _functions(text: str) -> list[Any]:
    """The functions and lambdas of a file's text; none where it is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]


def _canonical(node: Any) -> str:
    """A syntax tree as text, equal in all Python versions. ``ast.unparse`` and ``ast.dump`` are not: they differ in the
    quotes of f-strings, and in empty fields that only later versions have."""
    if isinstance(node, list):
        return f"[{', '.join(_canonical(entry) for entry in node if not _says_nothing(entry))}]"
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({', '.join(_fields(node))})"
    return repr(node)


def _fields(node: ast.AST) -> Iterator[str]:
    for name, value in ast.iter_fields(node):
        if value is not None and value != [] and name not in ("ctx", "kind", "type_comment"):
            yield f"{name}={_canonical(value)}"


def _says_nothing(entry: Any) -> bool:
    """Whether a statement is a docstring or another string alone."""
    return isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant) and isinstance(entry.value.value, str)
