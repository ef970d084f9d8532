"""Which layers' products ran in which precision: by sizes, since compiled code has no names.

Layers of equal sizes are one class. A product tells its class and role by its extents; see
:mod:`questions.layers.products` for them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.recipes import DGRAD, FPROP, HEADS, RECOMPUTE, WGRAD, Role
from pytest_fp8.watch.trace import BACKWARD

Layer = Mapping[str, Any]
BACK = (DGRAD, WGRAD, RECOMPUTE)
PROJECTIONS = (*HEADS, "out_proj_head", "unembed")


@dataclass
class Class:
    """Layers of the same sizes, and the products that ran for them."""

    inputs: int
    outputs: int
    layers: list[Layer]
    products: dict[Role, list[Product]] = field(default_factory=lambda: defaultdict(list))

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
        return listed(dict.fromkeys(end[0] if end else name for end, name in zip(ends, names, strict=True)))


@dataclass
class Attributed:
    classes: list[Class]
    """The most FLOPs first."""
    others: list[Product]
    """Products of no layer's sizes."""
    batched: list[Product]
    """Batches of products of no layer's sizes, as attention makes them where no kernel of its own does."""
    rows: int
    """Rows of a layer's input in most of the work."""

    @property
    def counted(self) -> list[Product]:
        mine = [product for each in self.classes for products in each.products.values() for product in products]
        return [*mine, *self.others]


def listed(names: Iterable[str]) -> str:
    """The first three, and how many more."""
    every = list(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def attribute(products: Sequence[Product], layers: Sequence[Layer]) -> Attributed:
    layers = with_edges(layers)
    classes: dict[tuple[int, int], Class] = {}
    for layer in layers:
        key = layer["in"], layer["out"]
        classes.setdefault(key, Class(*key, [])).layers.append(layer)
    rows: Counter[int] = Counter()
    forward = [product for product in products if product.phase != BACKWARD]
    for product in forward:
        for _, _, many in candidates(product, classes.values()):
            rows[many] += product.flops
    others: list[Product] = []
    room: Counter[tuple[int, Role, int, str]] = Counter()
    """Of a class, role and number of rows: products that are to come, in all and of a forward product's kind."""
    for product in forward:
        found = max(candidates(product, classes.values()), key=lambda each: rows[each[2]], default=None)
        if found is None:
            others.append(product)
            continue
        mine, role, many = found
        mine.products[role].append(product)
        if role == FPROP:
            room.update({(id(mine), other, many, kind): 1 for other in BACK for kind in ("", product.kind)})
    for product in [each for each in products if each.phase == BACKWARD]:
        possible = [each for each in candidates(product, classes.values()) if room[id(each[0]), *each[1:], ""] > 0]
        if not possible:
            others.append(product)
            continue
        # Two layers of swapped sizes have products of equal extents in the backward pass. What is not seen to recompute
        # does not, where it can be something else; a product is of a layer whose forward product was of its kind.
        mine, role, many = min(
            possible, key=lambda each: (each[1] == RECOMPUTE, room[id(each[0]), *each[1:], product.kind] <= 0)
        )
        room.subtract([(id(mine), role, many, ""), (id(mine), role, many, product.kind)])
        mine.products[role].append(product)
    seen = sorted((each for each in classes.values() if each.products), key=lambda each: -each.flops)
    batched = [product for product in others if product.batch > 1]
    single = [product for product in others if product.batch == 1]
    return Attributed(seen, single, batched, rows.most_common(1)[0][0] if rows else 0)


def candidates(product: Product, classes: Iterable[Class]) -> Iterator[tuple[Class, Role, int]]:
    """What a product may be: of which class, in which role, of how many rows."""
    if product.batch > 1:
        return
    one, two = product.outer
    backward = product.phase == BACKWARD
    # Of a bare parameter nothing says which side is the input. As torch's Linear has it comes first.
    plain = [(each, each.inputs, each.outputs) for each in classes]
    turned = [(each, each.outputs, each.inputs) for each in classes if not all(layer["sure"] for layer in each.layers)]
    for each, inputs, outputs in [*plain, *turned]:
        if backward and product.inner == outputs and inputs in (one, two):
            yield each, DGRAD, two if one == inputs else one
        if backward and sorted((one, two)) == sorted((inputs, outputs)):
            yield each, WGRAD, product.inner
        if product.inner == inputs and outputs in (one, two):
            role = RECOMPUTE if product.phase in (BACKWARD, RECOMPUTE) else FPROP
            yield each, role, two if one == outputs else one


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
