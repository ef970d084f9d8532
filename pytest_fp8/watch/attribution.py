"""Which layers' products ran in which precision: by sizes, since compiled code has no names.

Layers of equal sizes are one class. A product tells its class and role by its extents; see
:mod:`questions.layers.products` for them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import ABSENT, FP8, Attribution, LayerCall, Product, profiled_step
from pytest_fp8.recipes import HEADS, RECOMPUTE, ROLES, Role
from pytest_fp8.watch.trace import BACKWARD

Layer = Mapping[str, Any]
PROJECTIONS = (*HEADS, "out_proj_head", "unembed")


@dataclass
class Class:
    """Layers of the same sizes, and the products that ran for them."""

    inputs: int
    outputs: int
    layers: list[Layer]
    products: dict[Role, list[Attribution]] = field(default_factory=lambda: defaultdict(list))

    @property
    def flops(self) -> int:
        return sum(product.flops for products in self.products.values() for product in products)

    def kinds(self, role: Role) -> Counter[str]:
        """Precision -> number of products in a role."""
        return Counter(product.kind for product in self.products.get(role, ()))

    def in_fp8(self, role: Role) -> int:
        return self.kinds(role)[FP8]

    def share(self, role: Role) -> float:
        """Of the class's products in a role, those in FP8; 0 where there are none."""
        return self.in_fp8(role) / len(self.products[role]) if self.products.get(role) else 0.0

    def meant(self) -> list[Layer]:
        """Its layers whose class or weight is of FP8."""
        return [layer for layer in self.layers if layer["fp8_layer"]]

    @property
    def label(self) -> str:
        """The name of a single layer; the last parts of the names of several."""
        names = [layer["name"] for layer in self.layers]
        if len(names) == 1:
            return str(names[0])
        # An adapter's last part is the adapter's own name; a number says nothing without the name before it.
        ends = [re.search(r"[^.]*[^.\d][^.]*(\.\d+)*$", name.removesuffix(".default")) for name in names]
        return some([end[0] if end else name for end, name in zip(ends, names, strict=True)])


@dataclass
class Attributed:
    classes: list[Class]
    """The most FLOPs first."""
    others: list[Product]
    """Products of no layer's sizes; not those of batches, as attention makes them where no kernel of its own does."""
    rows: int
    """Rows of a layer's input in most of the work."""

    @property
    def counted(self) -> list[Product | Attribution]:
        mine = [product for each in self.classes for products in each.products.values() for product in products]
        return [*mine, *self.others]


def attribute(products: Sequence[Product], layers: Sequence[Layer]) -> Attributed:
    """Each forward product is a call of a layer; what such calls owe is counted as in any profiled step."""
    classes: dict[str, Class] = {}
    for layer in with_edges(layers):
        sizes = layer["in"], layer["out"]
        classes.setdefault(f"{sizes}", Class(*sizes, [])).layers.append(layer)
    single = [product for product in products if product.batch == 1]
    possible = [list(calls_of(product, classes)) for product in single if product.phase == "forward"]
    rows: Counter[int] = Counter()
    for each in possible:
        for call in each:
            rows[call.rows] += call.flops
    calls = [max(each, key=lambda call: rows[call.rows]) for each in possible if each]
    again = [replace(call, owed=(*ROLES, RECOMPUTE)) for call in calls]
    owed = {call.expected(role, phase) for call in again for role in call.owed for phase in (BACKWARD, RECOMPUTE)}
    mine = [product for product in single if product.extents in owed]
    step = profiled_step(mine, calls)
    # Two layers of swapped sizes have products of equal extents in the backward pass: what is not seen to recompute
    # does not, where it can be something else.
    repeated = {call.expected(RECOMPUTE, phase) for call in calls for phase in (BACKWARD, RECOMPUTE)}
    if any(product.extents in repeated for product in step.others):
        step = profiled_step(mine, again)
    others = [*step.others, *(product for product in single if product.extents not in owed)]
    for attribution in step.attributions:
        if attribution.kind != ABSENT:
            classes[attribution.layer].products[attribution.role].append(attribution)
    seen = sorted((each for each in classes.values() if each.products), key=lambda each: -each.flops)
    return Attributed(seen, others, rows.most_common(1)[0][0] if rows else 0)


def calls_of(product: Product, classes: Mapping[str, Class]) -> Iterator[LayerCall]:
    """What a forward product may be: a call of one of the classes, whose name it has, with so many rows."""
    one, two = product.outer
    # Of a bare parameter nothing says which side is the input. As torch's Linear has it comes first.
    plain = [(name, each.inputs, each.outputs) for name, each in classes.items()]
    turned = [(n, e.outputs, e.inputs) for n, e in classes.items() if not all(layer["sure"] for layer in e.layers)]
    for name, inputs, outputs in [*plain, *turned]:
        if product.inner == inputs and outputs in (one, two):
            yield LayerCall(name, inputs, outputs, two if one == outputs else one, fp8=product.kind == FP8)


def with_edges(layers: Sequence[Layer]) -> list[Layer]:
    """The layers in the model's order; the first and the last are marked, which conversions leave out by convention."""
    ordered = sorted(layers, key=lambda layer: layer["order"])
    base = [layer["name"] for layer in ordered if not layer["adapter"]]
    edges = {name: f"{which} layer" for name, which in zip(base[:1] + base[-1:], ("first", "last"), strict=False)}
    return [{**layer, "edge": edges.get(layer["name"], "")} for layer in ordered]


def is_head(layer: Layer) -> bool:
    return layer["name"].rpartition(".")[2] in PROJECTIONS


def odd(layer: Layer) -> bool:
    """Whether a size is not a multiple of 16, which FP8 products need."""
    return bool(layer["in"] % 16 or layer["out"] % 16)


def stays_for(layer: Layer) -> str:
    """Why a layer may well stay in high precision; empty where nothing visible forbids FP8."""
    if odd(layer):
        return f"size {layer['in']} x {layer['out']}, no multiple of 16"
    return "head" if is_head(layer) else "adapter" if layer["adapter"] else str(layer.get("edge", ""))
