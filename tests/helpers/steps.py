"""Profiled steps of both arms as they were recorded on an H200, changes to them, and the decision on their speedup."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

from pytest_fp8.questions.layers.evidence import LayersEvidence, WireTime
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence

RECORDED = Path(__file__).parent.parent / "data" / "h200_steps.json.gz"
TIMED = {
    "1b-bf16": 121.5,
    "1b-torchao-tensorwise": 106.0,
    "1b-transformer_engine-current": 206.0,
    "1b-transformer_engine-delayed": 126.0,
    "8b-bf16": 371.0,
    "8b-torchao-tensorwise": 299.0,
    "tiny-bf16": 10.5,
    "tiny-torchao-tensorwise": 18.9,
}
"""Milliseconds of the same arms' timed steps. Transformer Engine's host was slow."""


def gpu_step(milliseconds, products=(), **more) -> LayersEvidence:
    """What an arm says of a step, of which only the GPU's work counts."""
    return LayersEvidence({}, [], {}, [], [], {}, products, milliseconds=milliseconds, **more)


@cache
def recorded_step(name: str) -> LayersEvidence:
    rows = json.loads(gzip.decompress(RECORDED.read_bytes()))["steps"][name]
    products = [Product(*row[:2], tuple(row[2]), *row[3:]) for row in rows["products"]]
    return gpu_step(rows["milliseconds"], products, waits=rows["waits"])


def changed(step: LayersEvidence, **classes: float) -> LayersEvidence:
    """The step with other milliseconds in these classes; its busy time changes with them."""
    named = {name.replace("_", " "): value for name, value in classes.items()}
    more = sum(value - step.milliseconds[name] for name, value in named.items())
    milliseconds = {**step.milliseconds, **named, "busy": step.milliseconds["busy"] + more}
    return replace(step, milliseconds=milliseconds)


def with_products(step: LayersEvidence, *products: Product, name: str = "other products") -> LayersEvidence:
    """The step with these products more."""
    more = sum(product.milliseconds for product in products)
    grown = changed(step, **{name.replace(" ", "_"): step.milliseconds[name] + more})
    return replace(grown, products=[*step.products, *products])


def on_half_the_rows(step: LayersEvidence, rows: int) -> LayersEvidence:
    """The step as half as many rows take it: half the time in everything but the optimizer."""

    def half(product: Product) -> Product:
        inner = product.inner // 2 if product.inner == rows else product.inner
        outer = tuple(size // 2 if size == rows else size for size in product.outer)
        return replace(product, inner=inner, outer=outer, milliseconds=product.milliseconds / 2)

    names = ("fp8 products", "other products", "attention", "rest")
    halved = {name.replace(" ", "_"): step.milliseconds[name] / 2 for name in names}
    return replace(changed(step, **halved), products=[half(product) for product in step.products])


DELAYED = recorded_step("1b-transformer_engine-delayed")
BF16, FP8_ARM = recorded_step("1b-bf16"), recorded_step("1b-torchao-tensorwise")
NOISE = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2
OF_CHECK = ("history", "busy_history", "host_bound", "components", "cases", "baseline_reference_ms", "tolerance")


def sessions(speedup, count=4):
    """Stored sessions of four processes, all of this speedup."""
    return [[[math.log(speedup)] * 8] * 4] * count


def timed(bf16_ms=121.5, fp8_ms=106.0, **more):
    """Arms that are timed at these milliseconds in two processes."""
    blocks = {"bf16": [[bf16_ms * x for x in NOISE]] * 2, "fp8": [[fp8_ms * x for x in reversed(NOISE)]] * 2}
    return TimingEvidence(**{**blocks, **more})


def decided(evidence, floor=1.0, tolerance=0.02, **stored):
    return check_speedup(evidence, floor=floor, tolerance=tolerance, **stored)


def asked(bf16=BF16, fp8=FP8_ARM, bf16_ms=121.5, fp8_ms=106.0, floor=1.0, **more):
    """The decision on these steps, timed at these milliseconds in two processes."""
    check = {name: more.pop(name) for name in OF_CHECK if name in more}
    return decided(timed(bf16_ms, fp8_ms, bf16_step=bf16, fp8_step=fp8, **more), floor, **check)


def profiled(step, step_ms, busy_ms):
    return replace(step, step_ms=[step_ms] * 5, busy_ms=[busy_ms] * 5)


def sleeping(**more):
    """A reference that sleeps for 15 % of its step, and FP8 that waits for 2 %."""
    arms = {"bf16": profiled(BF16, 133.0, 113.0), "fp8": profiled(DELAYED, 97.6, 95.6)}
    return asked(**arms, bf16_ms=133.0, fp8_ms=97.6, **more)


def travelling(step, gather, reduce, exposed, elements=10**9, dtype="bfloat16", size=2):
    """The step on one of two ranks: so many milliseconds of collectives, of which ``exposed`` are busy time."""
    rows = [
        WireTime("all-gather", dtype, 64, elements, elements * size, gather),
        WireTime("reduce-scatter", "bfloat16", 32, elements, elements * 2, reduce),
    ]
    busy = step.milliseconds["busy"] + exposed
    milliseconds = {**step.milliseconds, "communication": gather + reduce, "busy": busy}
    return replace(step, milliseconds=milliseconds, wire=rows, exposed_ms=exposed)
