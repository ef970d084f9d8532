"""Findings of ``pytest-fp8 watch`` that need a GPU or a library to show in a script, from evidence made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from pytest_fp8.codes import W
from pytest_fp8.watch.judge import asked, judge
from pytest_fp8.watch.report import groups, verdict_of
from pytest_fp8.watch.trace import ENGINE


def rows(dtype: str) -> list[list[Any]]:
    """A forward and a backward product of a Linear of 64 to 32, 16 rows."""

    def product(start: int, thread: int, left: list[int], right: list[int]) -> list[Any]:
        name = "aten::_scaled_mm" if "Float8" in dtype else "aten::mm"
        return [name, False, start, start + 10, thread, 0, [left, right], [dtype, dtype], -1, None]

    node = [f"{ENGINE}MmBackward0", False, 20, 60, 2, 0, [], [], 5, None]
    return [product(0, 1, [16, 64], [64, 32]), node, product(30, 2, [16, 32], [32, 64])]


def evidence(dtype: str, **told: Any) -> dict[str, Any]:
    layer = {"name": "proj", "class": "transformer_engine.pytorch.Linear", "in": 64, "out": 32, "order": 0}
    state = {"sure": True, "dtype": "bfloat16", "fp8_layer": True, "trained": True, "stepped": True, "adapter": False}
    return {
        "pid": 1,
        "code": "",
        "reason": "",
        "device": {"type": "cuda", "name": "NVIDIA H100", "capability": [9, 0]},
        "environment": {},
        "arguments": [],
        "layers": [{**layer, **state, "parent": ""}],
        "events": rows(dtype),
        **told,
    }


def found(dtype: str, **told: Any) -> tuple[str, list[str]]:
    training = judge(evidence(dtype, **told))
    return training.verdict, [note.code for note in training.notes]


def test_autocast_that_is_off():
    assert found("c10::BFloat16", recipes={"off": 1}) == ("OFF", [W.SWITCHED_OFF])
    assert found("c10::Float8_e4m3fn", recipes={"DelayedScaling(margin=0)": 1}) == ("ON", [])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"device": {"type": "cuda", "name": "NVIDIA A100", "capability": [8, 0]}}, [W.NO_HARDWARE]),
        ({"environment": {"ACCELERATE_MIXED_PRECISION": "fp8"}}, [W.STEPPED_AROUND]),
        (
            {"environment": {"ACCELERATE_MIXED_PRECISION": "fp8"}, "settings": {"accelerate": "bf16"}},
            [W.OTHER_SETTING_DECIDES, W.STEPPED_AROUND],
        ),
        ({"compiled_while_timed": 2}, [W.STEPPED_AROUND, W.COMPILED_WHILE_TIMED]),
    ],
)
def test_off(told, expected):
    assert found("c10::BFloat16", **told) == ("OFF", expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fp8"], ["--fp8"]),
        (["--fp8", "--steps", "0"], ["--fp8"]),
        (["--fp8", "1"], ["--fp8"]),
        (["--fp8", "0"], []),
        (["--use_fp8=False"], []),
        (["--no-fp8"], []),
        (["--precision=fp8"], ["--precision=fp8"]),
        (["--precision", "fp8"], ["fp8"]),
        (["fp8", "0"], ["fp8"]),
        (["runs/fp8/config.yaml"], []),
    ],
)
def test_arguments_that_ask_for_fp8(arguments, expected):
    assert asked(judge(evidence("c10::BFloat16", arguments=arguments))) == expected


def test_a_recipe_says_its_options():
    @dataclass
    class DelayedScaling:
        fp8_format: Enum = Enum("Format", {"HYBRID": ("e4m3", "e5m2")}).HYBRID
        margin: int = 0

    from pytest_fp8.watch.model import recipes_in_force

    layer = type("Linear", (), {"__module__": "transformer_engine.pytorch", "fp8": True})()
    layer.fp8_meta, layer.modules = {"recipe": DelayedScaling()}, lambda: [layer]
    assert recipes_in_force([layer]) == {"DelayedScaling(fp8_format=hybrid, margin=0)": 1}


def test_the_worst_rank_decides():
    ranks = [
        judge(evidence(dtype, pid=number, rank=number, world=2, run="29500"))
        for number, dtype in enumerate(["c10::Float8_e4m3fn", "c10::BFloat16"])
    ]
    (group,) = groups(ranks)
    assert [each.verdict for each in group] == ["ON", "OFF"]
    assert verdict_of(group).evidence["rank"] == 1


def test_evidence_without_a_product_is_unknown():
    training = judge(evidence("c10::BFloat16") | {"events": rows("c10::BFloat16")[1:2]})
    assert (training.verdict, training.why.code) == ("UNKNOWN", W.NO_PRODUCTS)
    empty = judge(evidence("c10::BFloat16") | {"events": []})
    assert (empty.verdict, empty.why.code) == ("UNKNOWN", W.NOT_OBSERVED)
