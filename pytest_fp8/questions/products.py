"""The matrix products of one training step: which ran, in which precision, for which layer and role. Plain data.

A product is known by its *extents*: the inner (contracted) size and the two outer sizes. A Linear with ``M`` tokens,
``K`` inputs and ``N`` outputs gives three per step:

    ========  =============  =======  ========
    role      product        inner    outer
    ========  =============  =======  ========
    fprop     x . W^T        K        M, N
    dgrad     dy . W         N        M, K
    wgrad     dy^T . x       M        N, K
    ========  =============  =======  ========

Extents do not depend on how a library transposes its operands. Products of equal extents within a phase are matched
to layers in execution order (reversed in the backward pass, where number goes before order), which is how the autograd
engine runs them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, Role

FP8 = "fp8"
"""Both operands held FP8 values, and (on a GPU) an FP8 kernel multiplied them."""
EVALUATION = "evaluation"
"""The phase of a model's call without gradients: no training, so no layer's products, no peak and no time of a step."""


@dataclass(frozen=True)
class Product:
    """One matrix product that was executed. ``kind`` is ``fp8`` or the operands' type, e.g. ``bfloat16``."""

    phase: str
    inner: int
    outer: tuple[int, int]
    kind: str
    operator: str
    kernel: str = ""
    batch: int = 1

    @property
    def flops(self) -> int:
        """2 * inner * outer: one multiplication and one addition each."""
        return 2 * self.batch * self.inner * self.outer[0] * self.outer[1]

    @property
    def extents(self) -> tuple[str, int, tuple[int, int]]:
        small, large = sorted(self.outer)
        return self.phase, self.inner, (small, large)


@dataclass(frozen=True)
class LayerCall:
    """One Linear as the model called it: sizes, rows it saw, and which gradients it owes."""

    name: str
    in_features: int
    out_features: int
    rows: int
    needs_dgrad: bool = True
    needs_wgrad: bool = True
    fp8: bool = False
    training: bool = True
    """False where the layer was in eval mode."""
    recomputed: bool = False
    """Whether activation checkpointing drops what this call saved, so that it runs again in the backward pass."""
    turn: int = 0
    """How many backward passes of the step came before: micro-batches take turns."""

    def expected(self, role: Role, recomputed_in: str = "backward") -> tuple[str, int, tuple[int, int]]:
        """The extents of this layer's product in a role. ``recomputed_in``: the phase that recomputed products bear."""
        m, k, n = self.rows, self.in_features, self.out_features
        if role in (FPROP, RECOMPUTE):
            phase = "forward" if role == FPROP else recomputed_in
            return phase, k, (min(m, n), max(m, n))
        if role == DGRAD:
            return "backward", n, (min(m, k), max(m, k))
        return "backward", m, (min(n, k), max(n, k))

    def roles(self, recompute: bool) -> list[Role]:
        wanted = [FPROP]
        if recompute or self.recomputed:
            wanted.append(RECOMPUTE)
        if self.needs_dgrad:
            wanted.append(DGRAD)
        if self.needs_wgrad:
            wanted.append(WGRAD)
        return wanted


@dataclass(frozen=True)
class Attribution:
    """What one layer's role ran as: ``fp8``, another kind, or ``absent``. ``sure`` is false where two roles of equal
    extents ran in different precisions, so that which was which cannot be told."""

    layer: str
    role: Role
    kind: str
    flops: int
    sure: bool = True


@dataclass
class StepProducts:
    """All products of one step, attributed."""

    attributions: list[Attribution] = field(default_factory=list)
    others: list[Product] = field(default_factory=list)
    """Products that belong to no Linear, e.g. those inside a rotary embedding."""

    def count(self, role: Role, kind: str | None = None) -> int:
        return sum(1 for a in self.attributions if a.role == role and kind in (None, a.kind) and a.kind != "absent")

    def fp8_flops(self) -> int:
        return sum(a.flops for a in self.attributions if a.kind == FP8)

    def all_flops(self) -> int:
        ran = sum(a.flops for a in self.attributions if a.kind != "absent")
        return ran + sum(product.flops for product in self.others)

    def fp8_share(self) -> float:
        """Share of the step's matrix-product FLOPs that ran in FP8; attention's own products are not counted."""
        total = self.all_flops()
        return self.fp8_flops() / total if total else 0.0


def attribute(
    products: Iterable[Product],
    calls: Sequence[LayerCall],
    recompute: bool = False,
    fp8_roles: Collection[Role] = ROLES,
) -> StepProducts:
    """Match executed products to layers and roles.

    Within one set of extents the products run in the layers' order in the forward pass. In the backward pass they run
    in reverse order, dgrad before wgrad where a layer's are alike, as far as their number does not tell
    (:func:`_by_number`); a role among others of equal extents and unequal kinds is marked as not sure. Recomputed
    products may bear a phase of their own, ``recompute``. Rows may have moved between the pass that was observed and
    the step that was measured, where a router sends them; products that find no layer by their extents are then matched
    by the layer's own two sizes.

    ``recompute``: every call is recomputed; without it those that say so. ``fp8_roles``: the roles that the recipe runs
    in FP8.
    """
    recompute = recompute and not any(call.recomputed for call in calls)
    ran: dict[tuple[str, int, tuple[int, int]], list[Product]] = defaultdict(list)
    for product in products:
        # A hand-written step may evaluate in between, and an optimizer may multiply (Muon): no layer's products.
        if product.phase not in (EVALUATION, "optimizer"):
            ran[product.extents].append(product)
    recomputed_in = RECOMPUTE if any(phase == RECOMPUTE for phase, _, _ in ran) else "backward"

    slots: dict[tuple[str, int, tuple[int, int]], list[tuple[LayerCall, Role]]] = defaultdict(list)
    for call in calls:
        slots[call.expected(FPROP)].append((call, FPROP))
    backward = list(reversed(calls))
    backward.sort(key=lambda call: call.turn)
    for call in backward:
        for role in call.roles(recompute):
            if role != FPROP:
                slots[call.expected(role, recomputed_in)].append((call, role))

    result = StepProducts()
    open_slots: list[tuple[int, LayerCall, Role]] = []
    for extents, wanted in slots.items():
        seen = ran.pop(extents, [])
        if len(seen) < len(wanted):
            # What is missing is first of all a recomputation that ended early: a stable sort.
            wanted.sort(key=lambda slot: slot[1] == RECOMPUTE)
        owes_fp8 = [call.fp8 and (FPROP if role == RECOMPUTE else role) in fp8_roles for call, role in wanted]
        kinds = [product.kind for product in seen]
        sure = len(set(kinds)) < 2 or len({role for _, role in wanted}) < 2
        if extents[0] != "forward":
            kinds = _by_number(kinds, owes_fp8)
        for index, (call, role) in enumerate(wanted):
            kind = kinds[index] if index < len(kinds) else "absent"
            if kind == "absent":
                open_slots.append((len(result.attributions), call, role))
            flops = 2 * call.rows * call.in_features * call.out_features
            result.attributions.append(Attribution(call.name, role, kind, flops, sure=sure))
        result.others.extend(seen[len(wanted) :])
    for rest in ran.values():
        result.others.extend(rest)
    _match_moved(result, open_slots, recomputed_in)
    return result


def _by_number(kinds: list[str], owes_fp8: Sequence[bool]) -> list[str]:
    """The kinds of a backward pass's products of equal extents, in the order of the slots they fill.

    A compiled backward pass runs what is ready first, so that order says little where a Linear that was left out, or a
    role that a recipe keeps in high precision, is as large as one that owes FP8: at 8B, 4096 tokens make dgrad and
    wgrad of a 4096-wide Linear alike. The number decides: where just as many products ran in FP8 as are owed, they are
    the owed ones. One too few is always found, in one slot or another.
    """
    if len(kinds) != len(owes_fp8) or kinds.count(FP8) != sum(owes_fp8):
        return kinds
    high = iter([kind for kind in kinds if kind != FP8])
    return [FP8 if owed else next(high) for owed in owes_fp8]


def _match_moved(result: StepProducts, open_slots: list[tuple[int, LayerCall, Role]], recomputed_in: str) -> None:
    """Give slots without a product one that fits but for its rows; ``open_slots`` holds their attributions' places."""
    for index, call, role in open_slots:
        moved = next((p for p in result.others if _fits(p, call, role, recomputed_in)), None)
        if moved is not None:
            result.others.remove(moved)
            result.attributions[index] = Attribution(call.name, role, moved.kind, moved.flops)


def _fits(product: Product, call: LayerCall, role: Role, recomputed_in: str) -> bool:
    """Whether a product can be this layer's in this role, for any number of rows."""
    k, n = call.in_features, call.out_features
    phase = {FPROP: "forward", RECOMPUTE: recomputed_in}.get(role, "backward")
    if product.phase != phase or product.batch != 1:
        return False
    if role == WGRAD:
        return sorted(product.outer) == sorted((n, k))
    inner, outer = (n, k) if role == DGRAD else (k, n)
    return product.inner == inner and outer in product.outer


def role_table(step: StepProducts, calls: Sequence[LayerCall]) -> dict[Role, dict[str, int]]:
    """Per role: products expected of the converted layers, and how many of them ran in FP8."""
    converted = {call.name for call in calls if call.fp8}
    table: dict[Role, dict[str, int]] = {}
    for role in (*ROLES, RECOMPUTE):
        mine = [a for a in step.attributions if a.role == role and a.layer in converted]
        if mine:
            table[role] = {"expected": len(mine), "fp8": sum(a.kind == FP8 for a in mine)}
    return table


def products_from_json(rows: Iterable[dict[str, Any]]) -> list[Product]:
    return [Product(**{**row, "outer": (row["outer"][0], row["outer"][1])}) for row in rows]


def products_to_json(products: Iterable[Product]) -> list[dict[str, Any]]:
    return [asdict(product) for product in products]
