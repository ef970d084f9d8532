"""float32 numbers as text: how an arm tells sketches of gradients and what modules give."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from typing import Any


def in_text(numbers: Any) -> str:
    """Of an array of Python or of numpy."""
    return b64encode(numbers.tobytes()).decode()


def of_text(text: str) -> array[float]:
    return array("f", b64decode(text))
