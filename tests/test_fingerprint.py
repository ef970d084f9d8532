"""The hash of an own model's case on single values: what changes it, and what does not."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import os
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from pytest_fp8 import Workload
from pytest_fp8.fingerprint import Fingerprint

WIDTH = 64
SETTINGS = {"width": 64}


@dataclasses.dataclass
class Settings:
    width: int
    deeper: object = None


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width):
        self.width = width


class Project:
    depth = 2

    def __init__(self, width):
        self.width = width

    def build(self):
        return helper(self.width)


class Recipe(enum.Enum):
    NARROW = 64
    WIDE = 128


def helper(width):
    return [WIDTH for _ in range(width)]


def batch(step):
    return step


def holding(value):
    def build():
        return value

    return Workload(build=build, batch=batch).fingerprint()


def with_default(width):
    def build(width=width):
        return width

    return Workload(build=build, batch=batch).fingerprint()


def recursive(width):
    def build(left=3):
        return build(left - 1) if left else width

    return Workload(build=build, batch=batch).fingerprint()


def in_a_circle(width):
    settings = Settings(width)
    settings.deeper = [settings]
    return holding(settings)


def torch_module(width, seed=0):
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    return torch.nn.Linear(width, 16)


def library_s_settings(width):
    """A configuration object of a library, which keeps the version that made it."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(hidden_size=width)


HOLDERS = {
    "a number": holding,
    "a default": with_default,
    "itself too": recursive,
    "a dict": lambda width: holding({"deep": [{"width": width}]}),
    "a set": lambda width: holding({width, 16, "a"}),
    "a dataclass": lambda width: holding(Settings(width)),
    "a circle": in_a_circle,
    "slots": lambda width: holding(Slotted(width)),
    "an object": lambda width: holding(Project(width)),
    "a bound method": lambda width: Workload(build=Project(width).build, batch=batch).fingerprint(),
    "a partial": lambda width: Workload(build=functools.partial(helper, width=width), batch=batch).fingerprint(),
    "a namespace": lambda width: holding(SimpleNamespace(width=width)),
    "a path": lambda width: holding(PurePosixPath(f"data/{width}")),
    "an enum": lambda width: holding(Recipe(width)),
    "a library's settings": lambda width: holding(library_s_settings(width)),
    "a torch module": lambda width: holding(torch_module(width)),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_what_a_function_holds_is_part_of_the_hash(holder):
    assert holder(64) == holder(64)
    assert holder(64) != holder(128)


@pytest.mark.parametrize(
    ("name", "value"), [("WIDTH", 128), ("SETTINGS", {"width": 65}), ("helper", batch)], ids=lambda v: str(v)[:9]
)
def test_what_a_module_names_is_part_of_it_through_helpers_classes_and_comprehensions(monkeypatch, name, value):
    def build():
        return [Project(SETTINGS["width"]) for _ in range(2)]

    def mark():
        return Workload(build=build, batch=batch).fingerprint()

    before = mark()
    assert before == mark()
    monkeypatch.setattr(f"{__name__}.{name}", value)
    assert mark() != before


def test_a_class_s_own_constants_are_part_of_it(monkeypatch):
    before = holding(Project)
    monkeypatch.setattr(Project, "depth", 3)
    assert holding(Project) != before


def test_where_equal_values_are_held_is_not():
    shared = ("relu", 4)
    assert holding([shared, shared]) == holding([("relu", 4), tuple(iter(("relu", 4)))])


def test_numbers_that_each_process_draws_are_not():
    torch = pytest.importorskip("torch")
    assert holding(torch.randn(3)) == holding(torch.randn(3)) != holding(torch.randn(4))
    assert holding(torch.randn(3)) != holding(torch.randn(3, dtype=torch.bfloat16))
    assert holding(torch.bfloat16) != holding(torch.float16)
    assert holding(torch_module(64)) == holding(torch_module(64, seed=1))


def test_a_library_s_version_and_what_it_keeps_to_itself_are_not():
    one, two = library_s_settings(64), library_s_settings(64)
    two.transformers_version, two._name_or_path = "0.0", "elsewhere"
    assert holding(one) == holding(two)


def test_nor_is_a_library_s_source():
    import textwrap

    by_name, by_source = Fingerprint({__name__}), Fingerprint({__name__, "textwrap"})
    assert by_name.text(textwrap.dedent) != by_source.text(textwrap.dedent)
    assert by_name.text(helper) == by_source.text(helper)


def test_what_says_only_its_address_or_belongs_to_the_machine_counts_by_its_type(monkeypatch):
    assert holding(object()) == holding(object())
    assert holding(iter([1])) == holding(iter([2]))
    assert holding(logging.getLogger("a")) == holding(logging.getLogger("b"))
    before = holding(os.environ)
    monkeypatch.setenv("PYTEST_FP8_SOMETHING", "1")
    assert holding(os.environ) == before


def test_a_cached_function_counts_by_what_it_wraps():
    def cached(width):
        return functools.cache(lambda: width)

    assert holding(cached(64)) == holding(cached(64)) != holding(cached(128))
