"""Profiled steps of both arms as they were recorded on an H200, and changes to them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import Product

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
