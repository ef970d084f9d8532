"""Files that others may have edited: read as text and JSON, and rules for the fields of records in them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_fp8.plain import PlainDataError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,239}"
"""What may name a case: a file's name, of 255 bytes with its ending, that leaves no folder and is not hidden."""

Check = Callable[[Any, str], None]
"""A rule of an annotated field; raises :class:`Unsound` and names the field."""
Unsound = PlainDataError
"""What a file holds is not what it should be; the message names the field and says why."""


def read_regular(path: Path, most: int = 1 << 30) -> str:
    """The text of a file of at most ``most`` bytes. Raises ``FileNotFoundError`` and :class:`Unsound`."""
    try:
        return decoded(path.read_bytes(), most)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unsound(f"{type(error).__name__}: {error.strerror}") from error


def decoded(data: bytes, most: int = 1 << 30) -> str:
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
    except (ValueError, RecursionError) as error:
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
    """``text`` on one line, without control characters, cut off at ``most`` characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."


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
