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

Extents do not depend on how a library transposes its operands. :func:`profiled_step` counts products by them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, Role

ABSENT = "absent"
"""The kind of a product that did not run."""
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
    scales: tuple[str, ...] = ()
    """Of the operands, left and right: what one scale is for, as :mod:`pytest_fp8.casts` calls it, or an empty string;
    empty where they are not known."""
    powers: bool = False
    """Whether all scales are powers of two; only where they are known."""
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
    """One call of a Linear in the recorded step: its sizes, and its products in each role. Or what multiplies in a
    Linear's place: a function of the user's own in FP8, or code that takes an FP8 layer's weight in high precision."""

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
    """Whether it is an FP8 layer's: of a class that says so, or one that multiplies in FP8."""
    training: bool = True
    """False where the layer was in eval mode."""
    by: str = ""
    """The module whose code multiplies, where no Linear is called; empty where one is."""

    @property
    def past(self) -> bool:
        """Whether code multiplies with an FP8 layer's weight in high precision, and does not call the layer."""
        return bool(self.by) and all(product.kind != FP8 for product in self.ran.values())

    def expected(self, role: Role, recomputed_in: str = "backward") -> Extents:
        """The extents of this layer's product in a role. ``recomputed_in``: the phase of recomputed products."""
        if self.by and role in self.ran:
            # Code of one's own may multiply in parts.
            phase, *sizes = self.ran[role].extents
            return (recomputed_in if phase == RECOMPUTE else phase, *sizes)  # type: ignore[return-value]
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


@dataclass
class Attribution:
    """How one call's product in one role ran."""

    call: LayerCall
    role: Role
    recorded: str
    """The kind that the recorded step has; empty for any in high precision, where operators were not recorded."""
    kind: str = ABSENT
    """``fp8``, another kind, or ``absent``."""
    flops: int = 0
    among: Sequence[tuple[str, Role]] = ()
    """Layers and roles of equal sizes, of one of which this is: of which is not known. Empty where it is known."""

    @property
    def layer(self) -> str:
        return self.call.name

    def ran(self, product: Product) -> None:
        self.kind, self.flops = product.kind, product.flops


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
        ran = sum(a.flops for a in self.attributions if a.kind != ABSENT) + sum(p.flops for p in self.foreign)
        return ran + sum(p.flops for p in self.others if p.kind != FP8) or 1


def recorded_step(calls: Sequence[LayerCall], foreign: Iterable[Product], others: Iterable[Product]) -> StepProducts:
    """The products of a recorded step, in which each is known to be its call's."""
    attributions = []
    for call in calls:
        kinds = {role: call.ran[role].kind if role in call.ran else ABSENT for role in call.owed}
        attributions += [Attribution(call, role, kind, kind, call.flops) for role, kind in kinds.items()]
    return StepProducts(attributions, [each for each in foreign if each.phase in TRAINING], list(others))


def profiled_step(
    products: Iterable[Product],
    calls: Sequence[LayerCall],
    foreign: Iterable[Product] = (),
    others: Iterable[Product] = (),
    fp8_roles: Collection[Role] = ROLES,
) -> StepProducts:
    """The products of a step as it ran. The recorded step says whose they are, in ``calls``, ``foreign`` and
    ``others``, with the number of tokens of the step that ran.

    Both are counted by phase and sizes: a compiled step runs what is ready first, so that order says nothing. A
    layer's product ran as it was recorded where there is one more of this kind. What ran otherwise is one layer's of
    equal sizes, and of which is not known. A router may send other rows in the step that ran: what matches no sizes is
    matched by the layers' own two. ``fp8_roles``: what is expected of FP8 layers whose products were not recorded.
    """
    ran: dict[Extents, list[Product]] = defaultdict(list)
    for product in products:
        # A hand-written step may evaluate in between, and an optimizer may multiply (Muon): no layer's products.
        if product.phase in TRAINING:
            ran[product.extents].append(product)
    recomputed_in = RECOMPUTE if any(phase == RECOMPUTE for phase, _, _ in ran) else "backward"
    foreign = _taken_away(ran, foreign)
    spare = Counter(product.extents for product in others if product.kind != FP8)
    owed = [Attribution(call, role, _recorded(call, role, fp8_roles)) for call in calls for role in call.owed]
    for each in owed:
        each.flops = each.call.flops
    left: list[Product] = []
    for extents, alike in _by(lambda each: each.call.expected(each.role, recomputed_in), owed).items():
        left += _share_out(alike, ran.pop(extents, []), spare[extents])
    left += [product for rest in ran.values() for product in rest]
    moved = [each for each in owed if each.kind == ABSENT != each.recorded]
    for alike in _by(lambda each: (each.role, each.call.in_features, each.call.out_features), moved).values():
        fitting = [p for p in left if fits(p, alike[0].call, alike[0].role, recomputed_in)]
        left = [p for p in left if not any(p is other for other in fitting)]
        left += _share_out(alike, fitting, spare=len(fitting))
    return StepProducts(owed, foreign, left)


def _by(key: Callable[[Attribution], Hashable], owed: Iterable[Attribution]) -> dict[Any, list[Attribution]]:
    groups: dict[Any, list[Attribution]] = defaultdict(list)
    for each in owed:
        groups[key(each)].append(each)
    return groups


def _recorded(call: LayerCall, role: Role, fp8_roles: Collection[Role]) -> str:
    """The kind that the recorded step has. Where a library refuses to have its operators watched, what the recipe
    promises."""
    if call.ran:
        return call.ran[role].kind if role in call.ran else ABSENT
    return FP8 if call.fp8 and (FPROP if role == RECOMPUTE else role) in fp8_roles else ""


def _share_out(owed: Sequence[Attribution], ran: Sequence[Product], spare: int) -> list[Product]:
    """Say of products of equal sizes how they ran, by counting; gives those that are none of theirs. ``spare``: how
    many the recorded step has in high precision that nobody needs.

    Of those that were recorded in FP8 as many lost it as there are FP8 products too few, or products in high precision
    too many: FP8's may be gradients that nobody needs.
    """
    fp8, other = ([p for p in ran if (p.kind == FP8) is in_fp8] for in_fp8 in (True, False))
    # What is missing is first of all a recomputation, which ends as soon as it has what is needed.
    order = sorted(owed, key=lambda each: each.role == RECOMPUTE)
    in_fp8 = [each for each in order if each.recorded == FP8]
    high = [each for each in order if each.recorded not in (FP8, ABSENT)]
    lost = max(len(in_fp8) - len(fp8), len(other) - len(high) - spare, 0)
    kept = max(len(in_fp8) - lost, 0)
    for each in in_fp8[:kept]:
        each.ran(fp8.pop(0))
    for each in (*high, *in_fp8[kept:], *(each for each in order if each.recorded == ABSENT)):
        if other or fp8:
            each.ran((other or fp8).pop(0))
    for same in _by(lambda each: each.recorded, owed).values():
        among = list(dict.fromkeys((each.layer, each.role) for each in same))
        otherwise = [each for each in same if each.kind != each.recorded]
        for each in otherwise if len(otherwise) < len(same) and len(among) > 1 else ():
            each.among = among
    return [*other, *fp8]


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
