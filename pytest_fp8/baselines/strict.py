"""Files that others may have edited: parsed without NaN, checked field by field."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_fp8.plain import PlainDataError

MAX_BYTES = 1 << 20
"""Of one file. The largest baseline, eight sessions of eight processes, has about 60 kB."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,239}"
"""What may name a case, a GPU and a library: a file's name, of 255 bytes with its ending, that leaves no folder and is
not hidden."""

Check = Callable[[Any, str], None]
"""A rule of an annotated field; raises :class:`Unsound` and names the field."""
Unsound = PlainDataError
"""What a file holds is not what it should be; the message names the field and says why."""


def read_regular(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file of at most ``most`` bytes. Raises ``FileNotFoundError`` and :class:`Unsound`."""
    try:
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
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except Unsound:
        raise
    except RecursionError as error:
        raise Unsound("nested too deep") from error
    except ValueError as error:
        raise Unsound(f"no JSON: {error}") from error


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise Unsound(f"{text:.60} is no number, or too large a one")
    return value


def quoted(value: Any) -> str:
    """A value from a stranger as an error may print it: short, in ASCII, without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str, most: int) -> str:
    """``text`` as :func:`words` accept it: on one line, without control characters, cut off at ``most`` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def words(most: int, pattern: str = "") -> Check:
    """Printable text of at most ``most`` characters; with a ``pattern``, which it fits as a whole."""

    def check(value: Any, where: str) -> None:
        if len(value) > most or not value.isprintable() or (pattern and not re.fullmatch(pattern, value)):
            kind = f"text like {pattern}" if pattern else "printable text"
            raise Unsound(f"{where} is {quoted(value)}, not {kind} of at most {most} characters")

    return check


def between(low: float, high: float) -> Check:
    def check(value: Any, where: str) -> None:
        if not low <= value <= high:
            raise Unsound(f"{where} is {quoted(value)}, not a number from {low:g} to {high:g}")

    return check


def sized(least: int, most: int) -> Check:
    """A list or mapping of so many values."""

    def check(value: Any, where: str) -> None:
        if not least <= len(value) <= most:
            raise Unsound(f"{where} has {len(value)} values, not {least} to {most}")

    return check


def named(value: Any, where: str) -> None:
    """A mapping whose keys are like :data:`NAME`."""
    for name in value:
        words(80, NAME)(name, f"a name in {where}")


def date(value: Any, where: str) -> None:
    """A day as ``2026-11-22``."""
    try:
        words(10, r"[0-9]{4}-[0-9]{2}-[0-9]{2}")(value, where)
        datetime.date.fromisoformat(value)
    except ValueError as error:
        raise Unsound(f"{where} is {quoted(value)}, not a date like 2026-11-22") from error
