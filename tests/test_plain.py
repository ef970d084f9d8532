"""Records cross the pipe as plain data and come back whole; what lacks a key or has one too many is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from helpers.evidence import arm_ledger, curves, layers_evidence, loaded, saved
from pytest_fp8.plain import PlainDataError, from_plain, to_plain


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
    trained: Sequence[str] | None = None
    tables: Mapping[str, Sequence[Part]] = field(default_factory=dict)


PART = Part("q", (64, 32))
WHOLE = Whole(
    {"a": PART}, [1.0, float("inf")], ("x", "y"), {"deep": [1, {"two": None}]}, PART, None, {"t": [PART, PART]}
)


def travelled(record):
    return json.loads(json.dumps(to_plain(record)))


@pytest.mark.parametrize("record", [PART, WHOLE, Whole({}, [], (), {})])
def test_a_record_comes_back_as_it_went(record):
    assert from_plain(type(record), travelled(record)) == record


@pytest.mark.parametrize("key", ["main", "trained", "tables", "losses"])
def test_a_missing_key_is_an_error_even_where_the_field_has_a_default(key):
    data = travelled(WHOLE)
    del data[key]
    with pytest.raises(PlainDataError, match=f"Whole lacks '{key}'"):
        from_plain(Whole, data)


def test_a_key_that_the_record_has_no_field_for_is_an_error():
    with pytest.raises(PlainDataError, match="Part has no field 'sise'"):
        from_plain(Part, {**travelled(PART), "sise": 1})


def test_an_error_deep_inside_names_the_way_to_it():
    data = travelled(WHOLE)
    del data["tables"]["t"][1]["size"]
    with pytest.raises(PlainDataError, match=r"Whole\.tables\['t'\]\[1\] lacks 'size'"):
        from_plain(Whole, data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parts": []}, r"Whole\.parts is list, not a mapping"),
        ({"losses": "1.0"}, r"Whole\.losses is str, not a list"),
        ({"main": "q"}, r"Whole\.main is str, not a record"),
        ({"main": {"name": "q", "size": [1]}}, r"Whole\.main\.size has 1 values, not 2"),
        ({"losses": None}, r"Whole\.losses is NoneType, not a list"),
    ],
)
def test_a_value_of_another_shape_is_an_error(changes, says):
    with pytest.raises(PlainDataError, match=says):
        from_plain(Whole, {**travelled(WHOLE), **changes})


@dataclass(frozen=True)
class Scalars:
    text: str = ""
    count: int = 0
    share: float = 0.0
    on: bool = False
    none: int | None = None
    words: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("text", 1),
        ("text", None),
        ("count", "1"),
        ("count", 1.0),
        ("count", True),
        ("share", "1"),
        ("share", True),
        ("on", 1),
        ("none", "1"),
        ("words", [1]),
    ],
)
def test_a_scalar_of_another_type_is_an_error(key, wrong):
    with pytest.raises(PlainDataError, match=rf"Scalars\.{key}"):
        from_plain(Scalars, {**to_plain(Scalars()), key: wrong})


def positive(value, where):
    if value <= 0:
        raise PlainDataError(f"{where} is {value}")


@dataclass(frozen=True)
class Ruled:
    counts: Sequence[Annotated[int, positive]]


def test_a_rule_of_an_annotation_is_asked():
    assert from_plain(Ruled, {"counts": [1, 2]}) == Ruled([1, 2])
    with pytest.raises(PlainDataError, match=r"it\.counts\[1\] is 0"):
        from_plain(Ruled, {"counts": [1, 0]}, "it")


def test_a_whole_number_is_a_fraction_too():
    assert from_plain(Scalars, {**to_plain(Scalars()), "share": 1, "none": 2}).share == 1


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (layers_evidence(), "dropped_behaviour"),
        (layers_evidence(), "foreign"),
        (arm_ledger(), "waits"),
        (curves()[0], "movement"),
        (saved(), "untied"),
        (loaded(), "digests"),
    ],
)
def test_what_an_arm_does_not_say_is_never_taken_as_healthy(record, key):
    answer = to_plain(record)
    assert to_plain(from_plain(type(record), answer)) == answer
    del answer[key]
    with pytest.raises(PlainDataError, match=f"{type(record).__name__} lacks '{key}'"):
        from_plain(type(record), answer)
