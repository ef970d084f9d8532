"""The types of a case's fields and what they may mean, checked where a case is made: a person typed them in a mark.
And how they are written in its id."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

AT_LEAST = {"batch": 1, "seq": 1, "loss_steps": 1, "loss_seeds": 1}
"""Field -> its least number, where a case checks none of its own."""
SUITE_ALONE = {
    "batch": "the workload's batch(step) gives as many rows as you train with",
    "seq": "the workload's batch(step) gives sequences as long as you train with",
    "weights": "load them in the workload's build()",
}
"""Field that a user's own model has no use for -> what to do instead."""
EXAMPLES = {
    "str": ("a text", "'...'"),
    "bool": ("True or False", "True"),
    "int": ("a whole number", "1"),
    "float": ("a number", "1.0"),
    "tuple[str, ...]": ("a tuple of texts", "('...',)"),
    "Mapping[str, Any]": ("a dict with names as keys", "{'...': ...}"),
}
"""A field's annotation -> what a message calls it, and an example."""


def require_types(case: Any) -> None:
    """Raise :class:`SettingsError` for a field of another type of a :class:`pytest_fp8.Case` that is being made. A list
    becomes a tuple, and a path a text."""
    for field in fields(case):
        value, kind = getattr(case, field.name), str(field.type).removesuffix(" | None")
        if value is None and kind != field.type:
            continue
        if kind == "tuple[str, ...]" and isinstance(value, list):
            value = tuple(value)
            object.__setattr__(case, field.name, value)
        elif field.name == "weights" and isinstance(value, os.PathLike):
            value = os.fspath(value)
            object.__setattr__(case, field.name, value)
        least = AT_LEAST.get(field.name)
        if not _is(kind, value) or (least is not None and value < least):
            what, example = EXAMPLES[kind]
            example = repr(field.default) if kind == "float" else example
            refuse(
                R.BAD_VALUE,
                f"{field.name} of a case",
                expected=what if least is None else f"{what} from {least}",
                seen=f"{value!r:.80}, a {type(value).__name__}",
                next_step=f"{field.name}={_meant(kind, value, least) or example}",
            )


def _meant(kind: str, value: Any, least: int | None) -> str:
    """The value of a field's annotation that is nearest to what was given; empty where nothing is near."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if kind == "int":
            return str(max(least or 0, round(float(value))))
        if kind == "float":
            return repr(float(value))
    if kind == "bool" and str(value).lower() in ("0", "false", "no", "off"):
        return "False"
    if kind == "tuple[str, ...]" and isinstance(value, str) and value:
        return f"({value!r},)"
    return ""


def require_sense(case: Any, own: bool) -> None:
    """Raise :class:`SettingsError` for fields that nothing would read, and for a floor that nothing could miss.
    ``own``: the model comes from the user's workload."""
    for name, instead in SUITE_ALONE.items():
        if own and getattr(case, name) is not None:
            refuse(
                R.FIELDS_DISAGREE,
                f"{name}= with a model of your own",
                expected=f"no {name}=, which is for models of the suite",
                seen=f"{name}={getattr(case, name)!r:.80}",
                next_step=f"take it out of the mark; {instead}",
            )
    require_floor(case.floor)


def require_floor(floor: Any) -> None:
    """Raise :class:`SettingsError` for a floor that no speedup can be held against."""
    if not (_is("float", floor) and 0 < floor < math.inf):
        refuse(
            R.BAD_VALUE,
            "floor of a case",
            expected="a speedup over BF16 above 0, such as 1.0",
            seen=f"{floor!r:.80}, a {type(floor).__name__}",
            next_step="floor=1.0",
        )


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of a field's annotation. True is no number here."""
    if kind == "tuple[str, ...]":
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if kind == "Mapping[str, Any]":
        return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, {"str": str, "bool": bool}[kind])


def writable(part: str) -> str:
    """A part of a case's id in letters, digits, ``-``, ``_`` and ``.``, which file systems, ``-k`` and shells take. A
    part with other signs also gets six digits of its hash, so that ``größe`` and ``grüße`` stay two names.

    >>> writable("own.vit"), writable("own.a b")
    ('own.vit', 'own.a_b.454b88')
    """
    folded = re.sub(r"[^A-Za-z0-9._-]", "_", part)
    if folded == part:
        return part
    # A name may hold half a surrogate pair, which UTF-8 alone cannot encode.
    return f"{folded}.{hashlib.sha256(part.encode(errors='surrogatepass')).hexdigest()[:6]}"
