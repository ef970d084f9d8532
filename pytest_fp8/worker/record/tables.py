"""What questions ask of a recorded step: pure functions of its table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from pytest_fp8.questions.layers.products import FP8, TRAINING, LayerCall, Product, fits
from pytest_fp8.questions.ledger.evidence import Collective, Draw, ModuleCalls, OwnedProduct, enclosing
from pytest_fp8.questions.loss.evidence import ProductCount
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.worker.record.profile import profile_step
from pytest_fp8.worker.record.recorder import Call, Event, StepRecorder, StepTable
from pytest_fp8.worker.record.trace import kind_of
from pytest_fp8.worker.tensors import plain_name

# -- the comparison of both arms --------------------------------------------------------------------------------------

NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm", "rms_norm")
ROOTS = ("rsqrt", "sqrt")
"""What a norm that is written by hand takes of the mean square, after it has added its epsilon."""


def ledger_rows(table: StepTable) -> dict[str, Any]:
    """What the table says of a :class:`pytest_fp8.questions.ledger.evidence.ArmLedger`, by its fields."""
    calls, wire, draws = Counter[ModuleCalls](), Counter[Collective](), list[Draw]()
    waits, operators = defaultdict[str, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
    for call in table.calls:
        shape, dtype = call.tensors[0] if call.tensors else ((), "")
        calls[ModuleCalls(call.module, call.phase, shape, dtype, call.training, 1, call.outermost)] += 1
    added = ""
    for event in table.events:
        owner = table.owner(event)
        if event.waits:
            waits[owner][event.phase] += 1
        if event.state:
            draws.append(Draw(event.phase, owner, event.operator, event.shape, event.state))
        if event.bytes:
            wire[Collective(event.phase, kind_of(event.operator), event.dtype, event.bytes, 1)] += 1
        if event.counted:
            of_library = event.call >= 0 and table.calls[event.call].of_library
            kind, added = _kind(event, of_library, added)
            operators[owner][kind] += 1
    first = {(draw.operator, draw.state) for draw in draws if draw.phase != RECOMPUTE}
    again = [d.owner for d in draws if d.phase == RECOMPUTE and (d.operator, d.state) not in first]
    return {
        "calls": [replace(each, count=count) for each, count in calls.items()],
        "classes": {call.module: call.kind for call in table.calls},
        "products": products_of(table),
        "operators": operators,
        "waits": waits,
        "draws": draws,
        "wire": [replace(each, count=count) for each, count in wire.items()],
        "watched": table.watched,
        "recomputed_otherwise": list(dict.fromkeys(again)),
    }


def products_of(table: StepTable) -> list[OwnedProduct]:
    return [
        OwnedProduct(table.owner(event), product, event.weight) for event in table.events for product in event.products
    ]


def _kind(event: Event, of_library: bool, added: str) -> tuple[str, str]:
    """``operator dtype settings`` of one that is compared by number, and the numbers that were added last.
    ``added``: those that were before it."""
    operator = "attention" if "attention" in event.operator else event.operator
    numbers = _listed(number for number in event.numbers if isinstance(number, float))
    if operator in ROOTS:
        numbers = added
    elif "loss" in operator:
        # How it is reduced, and which labels it leaves out.
        numbers = _listed(event.numbers)
    elif not of_library and operator not in NORMS:
        # The rate of a dropout is a setting; a number in a module of the user's may count steps.
        numbers, added = "", numbers if operator.startswith("add") else ""
    settings = ",".join(filter(None, [numbers, *event.words]))
    return f"{operator} {event.dtype} {settings}".rstrip(), added


def _listed(numbers: Iterable[float]) -> str:
    return ",".join(f"{number:.4g}" for number in numbers)


def may_route(table: StepTable) -> bool:
    """Whether the host read a value, or an operator gave fewer rows than it was given: sizes may follow from it."""
    return any(event.chooses or event.waits for event in table.events)


def work_of(table: StepTable) -> Mapping[str, Counter[str]]:
    """All that each module did, by its kind; of calls, products and draws also the size."""
    work: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for call in table.calls:
        work[call.module][f"call {call.phase} {call.tensors}"] += 1
    for event in table.events:
        sizes = [product.extents for product in event.products] or (event.shape if event.state else ())
        work[table.owner(event)][f"{event.operator} {event.phase} {sizes}"] += 1
    return work


# -- layers -----------------------------------------------------------------------------------------------------------


@dataclass
class _LayerCall:
    """A call of a Linear in the forward part, with those that compute it again in the backward part."""

    call: Call
    again: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def trains(self) -> bool:
        """Not a target network's, nor one of an evaluation. Reentrant checkpointing calls the layer without gradients
        at first, and again in the backward pass."""
        return self.call.phase == "forward" or bool(self.again)


@dataclass
class LayerTable:
    """The products of a recorded step: whose each is."""

    calls: list[LayerCall]
    """The calls of Linears that train, in order, then what multiplies in FP8 or with a Linear's weight without one."""
    others: list[Product]
    """The Linears' products that no call needs: uncompiled, torchao computes gradients that nobody needs."""
    foreign: list[OwnedProduct]
    """Those that are no Linear's."""


def layer_table(table: StepTable, linears: Mapping[str, tuple[int, int]], live: Collection[str] = ()) -> LayerTable:
    """``linears``: live name -> (in_features, out_features). ``live``: those of a class that says that it is an FP8
    layer. So is each that multiplies in FP8 in any of its forward passes that train."""
    names = {plain_name(name): name for name in linears}
    latest: dict[str, list[_LayerCall]] = defaultdict(list)
    entries: list[_LayerCall] = []
    of_call: dict[int, _LayerCall] = {}
    for index, call in enumerate(table.calls):
        if call.module not in names:
            continue
        mine = latest[call.module]
        if call.part == "forward":
            of_call[index] = entry = _LayerCall(call)
            mine.append(entry)
            entries.append(entry)
        elif call.part == "backward" and mine:
            of_call[index] = entry = next((each for each in reversed(mine) if not each.again), mine[-1])
            entry.again.append(call)
    for event in table.events:
        inside = event.call if event.products else -1
        while inside >= 0 and inside not in of_call:
            inside = table.calls[inside].inside
        if inside >= 0:
            of_call[inside].events.append(event)
    calls, others, beside = list[LayerCall](), list[Product](), list[OwnedProduct]()
    for entry in entries:
        name = names[entry.call.module]
        told, left = _with_products(table, entry, name, *linears[name])
        others += left
        with_weight = [e for e in entry.events if e.weight == entry.call.module and e.phase != "backward"]
        own = {id(product) for event in with_weight for product in event.products}
        beside += [OwnedProduct(entry.call.module, each, name) for each in left if id(each) in own]
        if entry.trains:
            calls.append(told)
    multiply = {call.name for call in calls if FPROP in call.ran and call.ran[FPROP].kind == FP8}
    calls = [replace(call, fp8=call.fp8 or call.name in multiply) for call in calls]
    foreign = _foreign(table, names)
    by_hand, foreign = _own_products(foreign, {n: size for n, size in linears.items() if not latest[plain_name(n)]})
    in_fp8 = {*live, *multiply, *(call.name for call in by_hand)}
    past = [each for each in (*foreign, *beside) if each.weight in in_fp8 and each.product.kind != FP8]
    past = [each for each in past if each.product.phase in TRAINING]
    calls += by_hand + [_past_its_layer(each, *linears[each.weight]) for each in past]
    taken = {id(each.product) for each in past}
    return LayerTable(
        calls,
        [each for each in others if id(each) not in taken],
        [each for each in foreign if id(each.product) not in taken],
    )


def _with_products(
    table: StepTable, entry: _LayerCall, name: str, inputs: int, outputs: int
) -> tuple[LayerCall, list[Product]]:
    """The call with the products of its roles, and those that are left over."""
    each = [entry.call, *entry.again]
    shape = next((call.tensors[0][0] for call in each if call.tensors), ())
    owed: list[Role] = [FPROP, *([RECOMPUTE] if entry.again else [])]
    if not table.watched or any(call.reached for call in each):
        owed += [DGRAD] if any(call.needs_dgrad for call in each) else []
        owed += [WGRAD] if entry.call.needs_wgrad else []
    call = LayerCall(
        name,
        inputs,
        outputs,
        rows=prod(shape[:-1]),
        owed=owed,
        fp8=entry.call.fp8,
        training=entry.call.training,
    )
    by_phase: dict[str, list[Product]] = {"forward": [], RECOMPUTE: [], "backward": []}
    for event in entry.events:
        by_phase.setdefault(event.phase, []).extend(event.products)
    ran: dict[Role, Product] = {}
    gradients = [DGRAD, WGRAD] if len(by_phase["backward"]) > 1 else [role for role in owed if role in (DGRAD, WGRAD)]
    # Autograd computes the gradient of the first operand first.
    for role, phase in ((FPROP, "forward"), (RECOMPUTE, RECOMPUTE), *((role, "backward") for role in gradients)):
        product = _of_role(by_phase[phase], call, role)
        if product is not None:
            by_phase[phase].remove(product)
            ran[role] = product
    left = [product for role, product in ran.items() if role not in owed]
    left += [product for phase in ("forward", RECOMPUTE, "backward") for product in by_phase[phase]]
    return replace(call, ran={role: product for role, product in ran.items() if role in owed}), left


def _of_role(products: Sequence[Product], call: LayerCall, role: Role) -> Product | None:
    """The first product of the call's own sizes; else the first that fits it in all but rows, as where a layer
    multiplies in parts."""
    exact = call.expected(role)[1:]
    same = [product for product in products if product.extents[1:] == exact]
    return next(iter(same or [product for product in products if fits(product, call, role)]), None)


def _foreign(table: StepTable, names: Mapping[str, str]) -> list[OwnedProduct]:
    """Products that no Linear called. One with the weight of a Linear that is called in the same phase is made beside
    the Linear's own, as for a quantization error, and not in its place: it is left without the Linear's name."""
    called = {(call.module, call.phase) for call in table.calls}

    def in_place_of(each: OwnedProduct) -> str:
        phases = ("forward", RECOMPUTE) if each.product.phase == "backward" else (each.product.phase,)
        return "" if any((each.weight, phase) in called for phase in phases) else names.get(each.weight, "")

    foreign = [each for each in products_of(table) if enclosing(each.owner, names) is None]
    return [replace(each, weight=in_place_of(each)) for each in foreign]


def _past_its_layer(owned: OwnedProduct, inputs: int, outputs: int) -> LayerCall:
    """What stands for a product in high precision with the weight of an FP8 layer, in place of a call of the layer."""
    product = owned.product
    backward = DGRAD if product.inner == outputs else RECOMPUTE
    role = {"forward": FPROP, RECOMPUTE: RECOMPUTE}.get(product.phase, backward)
    rows = product.flops // (2 * inputs * outputs)
    return LayerCall(owned.weight, inputs, outputs, rows, [role], {role: product}, True, by=owned.owner or WHOLE)


WHOLE = "the model itself"


def _own_products(
    foreign: Sequence[OwnedProduct], uncalled: Mapping[str, tuple[int, int]]
) -> tuple[list[LayerCall], list[OwnedProduct]]:
    """Products in FP8 that functions of the user's own compute in the forward pass, as calls with their gradients'
    products; and all others. ``uncalled``: Linears that nobody calls, whose weights such a function may be given: q(x)
    becomes fp8_linear(x, q.weight)."""
    by_owner: dict[str, list[OwnedProduct]] = defaultdict(list)
    for owned in foreign:
        if owned.product.batch == 1 and owned.product.phase in TRAINING:
            by_owner[owned.owner].append(owned)
    calls, taken = list[LayerCall](), set[int]()
    for owner, mine in by_owner.items():
        # Products in FP8 first: of equal sizes they are those of a forward product in FP8.
        left = sorted((o for o in mine if o.product.phase != "forward"), key=lambda owned: owned.product.kind != FP8)
        forward = [each for each in mine if each.product.phase == "forward" and each.product.kind == FP8]
        made = [(_own_call(each.product, owner, uncalled), dict[Role, OwnedProduct]({FPROP: each})) for each in forward]
        for (call, _), ran in reversed(made):
            for role in (RECOMPUTE, DGRAD, WGRAD):
                expected = call.expected(role, RECOMPUTE)
                index = next((n for n, each in enumerate(left) if each.product.extents == expected), None)
                if index is not None:
                    ran[role] = left.pop(index)
        # Several micro-batches call in turn.
        turns: Counter[str] = Counter()
        for (call, names), ran in made:
            name = names[turns[call.name] % len(names)] if names else call.name
            turns[call.name] += 1
            products = {role: each.product for role, each in ran.items()}
            calls.append(replace(call, name=name, owed=list(ran), ran=products))
            taken.update(id(owned) for owned in ran.values())
    return calls, [each for each in foreign if id(each) not in taken]


def _own_call(product: Product, owner: str, uncalled: Mapping[str, tuple[int, int]]) -> tuple[LayerCall, list[str]]:
    """What stands for a forward product that no Linear called; and the Linears of its sizes that nobody calls: those
    inside the module that multiplies, or else all."""
    inputs, (rows, outputs) = product.inner, product.outer
    names = [name for name, size in uncalled.items() if size in ((inputs, outputs), (inputs, rows))]
    names = [name for name in names if not owner or plain_name(name).startswith(f"{owner}.")] or names
    if names and uncalled[names[0]][1] != outputs:
        rows, outputs = outputs, rows
    by = owner or WHOLE
    return LayerCall(f"{by} ({inputs} to {outputs})", inputs, outputs, rows, fp8=True, by=by), names


# -- curves -----------------------------------------------------------------------------------------------------------


def count(products: Sequence[Product]) -> dict[str, ProductCount]:
    """Products by phase. Evaluations inside a step are left out: they need not come in each step."""
    found = {phase: [p for p in products if p.phase == phase] for phase in TRAINING}
    return {
        phase: ProductCount(fp8=sum(p.kind == FP8 for p in ran), other=sum(p.kind != FP8 for p in ran))
        for phase, ran in found.items()
        if ran
    }


def counted_step(
    engine: Any, batch: Any, on_gradients: Callable[[], None]
) -> tuple[torch.Tensor, dict[str, ProductCount]]:
    """One training step that trains as ever: its loss, and its products by phase. On a GPU the step is profiled, about
    a second at 1B; on a CPU it is recorded, and code that the user compiled runs uncompiled in this one step."""
    losses: list[torch.Tensor] = []

    def step(phase: Callable[[str], Any]) -> None:
        losses.append(engine.step(batch, phase, on_gradients))

    if engine.device.type == "cuda":
        products = profile_step(step)["products"]
        return losses[0], count(products)
    recorder = StepRecorder(engine.model)
    with recorder.watching():
        step(recorder.in_phase)
    return losses[0], count([owned.product for owned in products_of(recorder.table)])
