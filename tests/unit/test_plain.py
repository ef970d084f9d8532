"""Records cross the pipe as plain data and come back whole; what lacks a key or has one too many is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from helpers.evidence import arm_ledger, curves, layers_evidence, transfer
from pytest_fp8.plain import PlainDataError, from_plain, to_plain


def positive(value, where):
    if value <= 0:
        raise PlainDataError(f"{where} is {value}")


@dataclass(frozen=True)
class Part:
    name: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Whole:
    parts: Mapping[str, Part]
    losses: Sequence[float]
    targets: tuple[str, ...]
    options: Mapping[str, Any]
    main: Part | None = None
    tables: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    on: bool = False
    count: Annotated[int, positive] = 1


PART = Part("q", (64, 32))
WHOLE = Whole({"a": PART}, [1.0, float("inf")], ("x", "y"), {"deep": [1, {"two": None}]}, PART, {"t": [PART, PART]})


def travelled(record, **changed):
    return {**json.loads(json.dumps(to_plain(record))), **changed}


@pytest.mark.parametrize("record", [PART, WHOLE, Whole({}, [], (), {})])
def test_a_record_comes_back_as_it_went(record):
    assert from_plain(type(record), travelled(record)) == record


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sise": 1}, r"Whole has no field 'sise'"),
        ({"parts": []}, r"Whole\.parts is list, not a mapping"),
        ({"losses": "1.0"}, r"Whole\.losses is str, not a list"),
        ({"main": "q"}, r"Whole\.main is str, not a record"),
        ({"main": {"name": "q", "size": [1]}}, r"Whole\.main\.size has 1 values, not 2"),
        ({"tables": {"t": [{"name": "q"}]}}, r"Whole\.tables\['t'\]\[0\] lacks 'size'"),
        ({"targets": [1]}, r"Whole\.targets\[0\] is int, not str"),
        ({"losses": [True]}, r"Whole\.losses\[0\] is bool, not float"),
        ({"on": 1}, r"Whole\.on is int, not bool"),
        ({"count": True}, r"Whole\.count is bool, not int"),
        ({"count": 0}, r"Whole\.count is 0"),
    ],
)
def test_a_value_of_another_kind_is_an_error_that_names_the_way_to_it(changes, says):
    with pytest.raises(PlainDataError, match=says):
        from_plain(Whole, travelled(WHOLE, **changes))


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (layers_evidence(), "dropped_behaviour"),
        (layers_evidence(), "foreign"),
        (arm_ledger(), "waits"),
        (curves()[0], "movement"),
        (transfer().saved, "on_disk"),
        (transfer().loaded, "digests"),
    ],
)
def test_what_an_arm_does_not_say_is_never_taken_as_healthy(record, key):
    answer = to_plain(record)
    assert to_plain(from_plain(type(record), answer)) == answer
    del answer[key]
    with pytest.raises(PlainDataError, match=f"{type(record).__name__} lacks '{key}'"):
        from_plain(type(record), answer)
