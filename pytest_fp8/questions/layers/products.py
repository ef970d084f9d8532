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

Extents do not depend on how a library transposes its operands. :func:`attribute` matches products to layers by them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, Role

FP8 = "fp8"
"""Both operands held FP8 values, and (on a GPU) an FP8 kernel multiplied them."""
Extents = tuple[str, int, tuple[int, int]]
"""Phase, inner size, the two outer sizes in order."""
EVALUATION = "evaluation"
"""The phase of a model's call without gradients. It is no training: its products, memory and time are not counted."""
TRAINING = ("forward", "backward", RECOMPUTE)
"""The phases whose products are counted: not those of an evaluation in between, nor an optimizer's own (Muon)."""
CONVOLUTION, RECURRENT = "convolution", "recurrent layer"
"""Operators that a profile of a GPU does not list as products; they come from the uncompiled step."""


@dataclass(frozen=True)
class Product:
    """One matrix product that was executed."""

    phase: str
    """``forward``, ``backward``, ``recompute``, ``optimizer`` or ``evaluation``."""
    inner: int
    outer: tuple[int, int]
    kind: str
    """``fp8``, or the type of the operands, e.g. ``bfloat16``."""
    operator: str
    kernel: str = ""
    """The GPU kernel that ran it; empty on a CPU."""
    batch: int = 1
    """Products in one call, for batched operators."""
    milliseconds: float = 0.0
    """GPU time of the kernels that the call launched; 0 on a CPU."""
    formats: tuple[str, ...] = ()
    """FP8 formats of the operands, ``e4m3`` or ``e5m2``, left and right; empty where they are not FP8 or not known."""
    fast_accumulation: bool | None = None
    """Whether sums are kept in fewer bits than float32; ``None`` where the call does not say."""

    @property
    def flops(self) -> int:
        """2 * inner * outer: one multiplication and one addition each."""
        return 2 * self.batch * self.inner * self.outer[0] * self.outer[1]

    @property
    def extents(self) -> Extents:
        """(phase, inner size, outer sizes in order): what products are matched to layers by."""
        small, large = sorted(self.outer)
        return self.phase, self.inner, (small, large)


@dataclass(frozen=True)
class LayerCall:
    """One call of a Linear in the recorded step: its sizes, and its products in each role."""

    name: str
    in_features: int
    out_features: int
    rows: int
    owed: Sequence[Role] = ROLES
    """The roles in which the step needs a product of this call, ``recompute`` among them where the call runs again in
    the backward pass."""
    ran: Mapping[Role, Product] = field(default_factory=dict)
    """The products that the recorded step ran in these roles. One that is owed and not here did not run; empty where a
    library refuses to have its operators watched."""
    fp8: bool = False
    training: bool = True
    """False where the layer was in eval mode."""
    microbatch: int = 0
    """How many backward passes of the step came before."""

    def expected(self, role: Role, recomputed_in: str = "backward") -> Extents:
        """The extents of this layer's product in a role. ``recomputed_in``: the phase of recomputed products."""
        m, k, n = self.rows, self.in_features, self.out_features
        if role in (FPROP, RECOMPUTE):
            phase = "forward" if role == FPROP else recomputed_in
            return phase, k, (min(m, n), max(m, n))
        if role == DGRAD:
            return "backward", n, (min(m, k), max(m, k))
        return "backward", m, (min(n, k), max(n, k))

    @property
    def flops(self) -> int:
        """Of each of its products."""
        return 2 * self.rows * self.in_features * self.out_features

    @property
    def recomputed(self) -> bool:
        return RECOMPUTE in self.owed

    def roles(self, recompute: bool) -> list[Role]:
        """The roles in which this call has a product. ``recompute``: every call is recomputed."""
        return [*self.owed, *((RECOMPUTE,) if recompute and not self.recomputed else ())]


@dataclass(frozen=True)
class Attribution:
    """How one layer's product in one role ran."""

    layer: str
    role: Role
    kind: str
    """``fp8``, another kind, or ``absent``."""
    flops: int
    sure: bool = True
    """False where two roles of equal extents ran in different precisions: which ran in which is then unknown."""


@dataclass
class StepProducts:
    """All products of one step, attributed."""

    attributions: list[Attribution] = field(default_factory=list)
    foreign: Sequence[Product] = ()
    """Products that no Linear called, e.g. those inside a rotary embedding."""
    others: list[Product] = field(default_factory=list)
    """Products that no Linear needs: uncompiled, torchao computes the gradients of the first layer's input and of
    frozen weights, too."""

    def fp8_share(self) -> float:
        """Share of the step's matrix-product FLOPs that ran in FP8. Not counted: attention's own products, and FP8
        products that no layer needs, which a compiled step leaves out."""
        of_linears = sum(a.flops for a in self.attributions if a.kind == FP8)
        return (of_linears + sum(p.flops for p in self.foreign if p.kind == FP8)) / self.flops()

    def flops(self) -> int:
        """Those that the shares are of; 1 where nothing ran."""
        ran = sum(a.flops for a in self.attributions if a.kind != "absent") + sum(p.flops for p in self.foreign)
        return ran + sum(p.flops for p in self.others if p.kind != FP8) or 1


def recorded_step(calls: Sequence[LayerCall], foreign: Iterable[Product], others: Iterable[Product]) -> StepProducts:
    """The products of a recorded step, in which each is known to be its call's."""
    attributions = []
    for call in calls:
        # Products of equal extents are told apart by the order in which autograd computes gradients.
        kinds = {call.ran[role].kind for role in (DGRAD, WGRAD) if role in call.ran}
        alike = call.expected(DGRAD) == call.expected(WGRAD) and len(kinds) > 1
        for role in call.owed:
            kind = call.ran[role].kind if role in call.ran else "absent"
            sure = not (alike and role in (DGRAD, WGRAD))
            attributions.append(Attribution(call.name, role, kind, call.flops, sure))
    return StepProducts(attributions, [each for each in foreign if each.phase in TRAINING], list(others))


def attribute(
    products: Iterable[Product],
    calls: Sequence[LayerCall],
    recompute: bool = False,
    fp8_roles: Collection[Role] = ROLES,
    foreign: Iterable[Product] = (),
) -> StepProducts:
    """Match executed products to layers and roles.

    Products of equal extents run in the layers' order in the forward pass, and in reverse order in the backward pass:
    dgrad before wgrad where a layer's two are alike. There their number counts before their order (:func:`_by_number`).
    Where roles of equal extents ran in different precisions, the match is not sure. A router may send other rows in the
    measured step than in the observed pass: what matches no extents is matched by the layer's own two sizes.

    ``recompute``: every call is recomputed; else those that say so. ``fp8_roles``: the roles that the recipe runs in
    FP8. ``foreign``: products of the uncompiled step that no Linear called; they are taken away before anything is
    matched, so that a raw parameter of a Linear's size is not taken for it.
    """
    recompute = recompute and not any(call.recomputed for call in calls)
    ran: dict[Extents, list[Product]] = defaultdict(list)
    for product in products:
        # A hand-written step may evaluate in between, and an optimizer may multiply (Muon): no layer's products.
        if product.phase in TRAINING:
            ran[product.extents].append(product)
    recomputed_in = RECOMPUTE if any(phase == RECOMPUTE for phase, _, _ in ran) else "backward"
    slots = _slots(calls, recompute, recomputed_in)
    spare = _spare(calls, fp8_roles)
    result = StepProducts(foreign=_taken_away(ran, foreign))
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
            kinds = _by_number(kinds, owes_fp8, spare[extents])
        for index, (call, role) in enumerate(wanted):
            kind = kinds[index] if index < len(kinds) else "absent"
            if kind == "absent":
                open_slots.append((len(result.attributions), call, role))
            result.attributions.append(Attribution(call.name, role, kind, call.flops, sure=sure))
        result.others.extend(seen[len(wanted) :])
    for rest in ran.values():
        result.others.extend(rest)
    _match_moved(result, open_slots, recomputed_in)
    return result


def _taken_away(ran: dict[Extents, list[Product]], foreign: Iterable[Product]) -> list[Product]:
    """The foreign products, removed from ``ran``. A profile lists no convolutions and recurrent layers: those of the
    uncompiled step are counted. Any other that did not run in this step is not."""
    others = []
    for product in foreign:
        same = [p for p in ran.get(product.extents, ()) if (p.kind, p.batch) == (product.kind, product.batch)]
        if same:
            ran[product.extents].remove(same[0])
            others.append(same[0])
        elif product.operator in (CONVOLUTION, RECURRENT) and product.phase != EVALUATION:
            others.append(product)
    return others


def _slots(
    calls: Sequence[LayerCall], recompute: bool, recomputed_in: str
) -> dict[Extents, list[tuple[LayerCall, Role]]]:
    """The products that the calls need, by extents, in the order in which they run."""
    slots: dict[Extents, list[tuple[LayerCall, Role]]] = defaultdict(list)
    for call in calls:
        slots[call.expected(FPROP)].append((call, FPROP))
    backward = list(reversed(calls))
    backward.sort(key=lambda call: call.microbatch)
    for call in backward:
        for role in call.roles(recompute):
            if role != FPROP:
                slots[call.expected(role, recomputed_in)].append((call, role))
    return slots


def _spare(calls: Sequence[LayerCall], fp8_roles: Collection[Role]) -> Counter[Extents]:
    """Gradients that nobody needs and an FP8 layer may compute in high precision all the same: torchao computes both,
    so that a layer whose weights rest for one loss has a wgrad there."""
    return Counter(
        call.expected(role)
        for call in calls
        for role in (DGRAD, WGRAD)
        if call.fp8 and role not in fp8_roles and role not in call.owed
    )


def _by_number(kinds: list[str], owes_fp8: Sequence[bool], spare: int) -> list[str]:
    """The kinds of a backward pass's products of equal extents, in the order of the slots they fill.

    A compiled backward pass runs what is ready first, so order says little where what stays in high precision has the
    extents of what must run in FP8. The number decides: where as many products ran in high precision as may, they are
    taken for those that may, and FP8's for those that must. One too few is always found, in one slot or another. More
    than there are slots are gradients that nobody needs: in FP8 any number, in high precision ``spare`` ones.
    """
    high = [kind for kind in kinds if kind != FP8]
    in_fp8, may = len(kinds) - len(high), len(owes_fp8) - sum(owes_fp8)
    if in_fp8 < sum(owes_fp8) or not may <= len(high) <= may + spare:
        return kinds
    left = iter(high)
    return [FP8 if owed else next(left) for owed in owes_fp8]


def _match_moved(result: StepProducts, open_slots: list[tuple[int, LayerCall, Role]], recomputed_in: str) -> None:
    """Give each slot without a product one that fits it in all but rows. ``open_slots``: index of its attribution."""
    for index, call, role in open_slots:
        moved = next((p for p in result.others if fits(p, call, role, recomputed_in)), None)
        if moved is not None:
            result.others.remove(moved)
            result.attributions[index] = Attribution(call.name, role, moved.kind, moved.flops)


def fits(product: Product, call: LayerCall, role: Role, recomputed_in: str = RECOMPUTE) -> bool:
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
