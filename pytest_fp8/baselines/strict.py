"""Files that others may have edited: parsed without NaN, checked field by field."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
"""Of one file. The largest baseline, eight sessions of eight processes, has about 60 kB."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""What may name a case, a GPU and a library: a file's name that leaves no folder and is no hidden file."""

Check = Callable[[Any, str], None]
"""Raises :class:`Unsound` for a value that is not as it should be; the text names the field."""


class Unsound(ValueError):
    """What a file holds is not what it should be; the message names the field and says why."""


def read_regular(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a regular file of at most ``most`` bytes. Raises ``FileNotFoundError`` and :class:`Unsound`."""
    try:
        # A pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise Unsound("not a regular file")
        with path.open("rb") as stream:
            return decoded(stream.read(most + 1), most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unsound(f"{type(error).__name__}: {error.strerror}") from error


def decoded(data: bytes, most: int = MAX_BYTES) -> str:
    """The text of a file's bytes, at most ``most``. Raises :class:`Unsound`."""
    if len(data) > most:
        raise Unsound(f"larger than {most} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unsound(f"not UTF-8 at byte {error.start}") from error


def parse(text: str) -> Any:
    """JSON without NaN and infinity. Raises :class:`Unsound`."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except Unsound:
        raise
    except RecursionError as error:
        raise Unsound("nested too deep") from error
    except ValueError as error:
        raise Unsound(f"no JSON: {error}") from error


def _no_number(text: str) -> Any:
    raise Unsound(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise Unsound(f"{quoted(text)} is too large a number")
    return value


def quoted(value: Any) -> str:
    """A value from a stranger as an error may print it: short, in ASCII, without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str, most: int) -> str:
    """``text`` as :func:`words` accept it: on one line, without control characters, cut off at ``most`` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


# -- checks of one value -----------------------------------------------------------------------------------------------


def record(data: Any, where: str, checks: Mapping[str, Check], optional: tuple[str, ...] = ()) -> None:
    """An object with exactly these fields; those named in ``optional`` may be missing."""
    if not isinstance(data, dict):
        raise Unsound(f"{where} is {quoted(data)}, not an object")
    missing = [name for name in checks if name not in data and name not in optional]
    unknown = [quoted(name) for name in data if name not in checks]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has unknown fields: {', '.join(unknown[:5])}"] if unknown else []
        raise Unsound(f"{where} {' and '.join(said)}")
    for name, value in data.items():
        checks[name](value, f"{where}.{name}")


def words(most: int, pattern: str = "") -> Check:
    """Printable text of at most ``most`` characters; with a ``pattern``, which it fits as a whole."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise Unsound(f"{where} is {quoted(value)}, not text")
        if len(value) > most or not value.isprintable() or (pattern and not re.fullmatch(pattern, value)):
            kind = f"text like {pattern}" if pattern else "printable text"
            raise Unsound(f"{where} is {quoted(value)}, not {kind} of at most {most} characters")

    return check


def number(low: float, high: float, whole: bool = False) -> Check:
    """A number from ``low`` to ``high``; ``whole``: a whole one."""
    kind = "a whole number" if whole else "a number"

    def check(value: Any, where: str) -> None:
        right = isinstance(value, int) if whole else isinstance(value, int | float)
        if not right or isinstance(value, bool) or not low <= value <= high:
            raise Unsound(f"{where} is {quoted(value)}, not {kind} from {low:g} to {high:g}")

    return check


def listed(check: Check, least: int, most: int) -> Check:
    """A list of ``least`` to ``most`` values, each of which passes ``check``."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise Unsound(f"{where} is {quoted(value)}, not a list")
        if not least <= len(value) <= most:
            raise Unsound(f"{where} has {len(value)} values, not {least} to {most}")
        for index, item in enumerate(value):
            check(item, f"{where}[{index}]")

    return checked


def one_of(*allowed: Any) -> Check:
    def check(value: Any, where: str) -> None:
        if not any(value is known or (isinstance(value, str) and value == known) for known in allowed):
            raise Unsound(f"{where} is {quoted(value)}, not one of {', '.join(map(repr, allowed))}")

    return check


def named(check: Check, most: int) -> Check:
    """An object of at most ``most`` fields whose names are like :data:`NAME`; every value passes ``check``."""

    def checked(value: Any, where: str) -> None:
        if not isinstance(value, dict) or len(value) > most:
            raise Unsound(f"{where} is not an object of at most {most} fields")
        for name, item in value.items():
            words(80, NAME)(name, f"a name in {where}")
            check(item, f"{where}.{name}")

    return checked


def date(value: Any, where: str) -> None:
    """A day as ``2026-11-22``."""
    try:
        words(10, r"[0-9]{4}-[0-9]{2}-[0-9]{2}")(value, where)
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise Unsound(f"{where} is {quoted(value)}, not a date like 2026-11-22") from error
