"""Compares the arms' ledgers, and says of each difference that FP8 does not explain what it means. Pure.

A :class:`Row` reads facts of each arm, and one comparer compares them. Kinds of work are told from coarse to fine, as
the sizes of products, then their precision: the first step at which the arms differ says which code it is. What FP8 may
change in one direction alone, and what a conversion did to the weights, is compared by a function of its own. A new
class of fault needs a row in :data:`ROWS`, not a new check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_fp8.codes import C, Code, D, L, N
from pytest_fp8.plain import of_text
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.evidence import OUTSIDE, ArmLedger, TensorNote, TwoLedgers, Weight, enclosing
from pytest_fp8.recipes import RECOMPUTE, backend_type
from pytest_fp8.verdicts import Decision, Finding, Verdict

LAYERS, LOSS, SPEED, MEMORY = "layers", "loss", "speedup", "memory"
EVERY = (LAYERS, LOSS, SPEED, MEMORY)
QUESTIONS: Mapping[Code, tuple[str, ...]] = {
    **dict.fromkeys((D.OTHER_DATA, D.OTHER_INPUTS), (LOSS,)),
    **dict.fromkeys((D.OTHER_MODEL, D.OTHER_OPTIMIZER, D.OTHER_UPDATES, D.OTHER_CLIPPING), (LAYERS, LOSS)),
    **dict.fromkeys((D.OTHER_RANDOM_NUMBERS, D.RECOMPUTED_OTHERWISE, L.NOT_IN_OPTIMIZER), (LAYERS, LOSS)),
    D.OTHER_WAITS: (LAYERS, SPEED),
}
"""Those whose answer a difference changes; else what a conversion answers for (L) that of layers, and others every one.
A FAIL is reported by the questions that answer for it; the others say what they see."""
OF_DTYPES = (D.OTHER_PRECISION, D.OTHER_OPERATOR_SETTING)
"""Not asked where dtypes outside FP8 are others by design."""
STANDS = frozenset({C.FP8_LOST, C.TOO_EXACT, C.WEIGHTS_STAND_STILL, C.NOT_ANEW})
"""Said before what the ledger finds, which may be a symptom: what leaves FP8, holds weights still or is kept from curve
to curve has work of its own in one arm."""
MAY_FOLLOW = frozenset({N.OUTLIER, N.GRADIENT_TIMES, N.BIAS_GRADIENT, N.OTHER_GRADIENT, D.OTHER_RANDOM_NUMBERS})
"""Of gradients beside BF16's: other work in one arm explains them. A product beside its own operands, or what the
optimizer is given beside the arm's own products, is wrong whatever else the arms do differently."""
LIBRARIES = ("transformer_engine.", "torchao.", "unsloth")
"""How the class paths of FP8 libraries' own modules begin."""
CLIPS = 1.5
"""Gradients are clipped in one arm alone where the shares that clipping leaves of their norms differ by this factor
(docs/limits.md)."""
OTHER = 0.01
"""Share of all updates by which the arms may differ: sums that are added in another order move single values."""


@dataclass(frozen=True)
class Difference(Finding):
    """One value that differs between the arms and that FP8 does not explain. ``expected``: the reference's value;
    ``seen``: the FP8 arm's. ``questions``: those whose answer it changes."""

    questions: tuple[str, ...] = EVERY


Differences = Iterator[Difference]


def compare(ledgers: TwoLedgers) -> list[Difference]:
    """All differences that FP8 does not explain, in the order of :data:`ROWS`."""
    explained = Explained(ledgers)
    return [each for row in ROWS for each in row(ledgers.reference, ledgers.fp8, explained)]


def find_in_ledger(ledgers: TwoLedgers, question: str, code: Code | None = None) -> Finding | None:
    """The first difference that changes the answer to ``question``, or ``None``; so where there is none of ``code``."""
    found = [each for each in compare(ledgers) if question in each.questions]
    if not found or (code is not None and code not in [each.code for each in found]):
        return None
    first = next((each for each in found if each.verdict is Verdict.FAIL), found[0])
    also = [each.about for each in found if each.about != first.about]
    seen = first.seen + (f"; other differences: {some(also)}" if also else "")
    return replace(first, expected=f"as in the BF16 arm: {first.expected}", seen=seen)


def unless_unlike(decision: Decision, ledgers: TwoLedgers) -> Decision:
    """``decision``, or in its place what the ledgers say where the arms differ in what its question compares.

    What is INVALID by itself stays so, but for a switch of torch's in one arm: TF32 there makes kernels shorter, which
    would read as less work.
    """
    if decision.code in STANDS:
        return decision
    found = find_in_ledger(ledgers, decision.question)
    if found is None or (decision.verdict is found.verdict is Verdict.INVALID and found.code != D.OTHER_SWITCH):
        return decision
    return found.answer(decision.question, decision.figures)


def blame_in_ledger(decision: Decision, ledgers: TwoLedgers) -> Decision:
    """A numerics ``decision`` that fails: where the arms did not do the same work, and it may follow from that, the
    difference is said first; else behind what numerics saw."""
    found = find_in_ledger(ledgers, LOSS)
    if found is None:
        return decision
    if decision.code not in MAY_FOLLOW:
        return replace(decision, seen=f"{decision.seen}; besides: {found.headline}: {found.seen}")
    seen = f"{found.seen}; it follows that {decision.headline}: {decision.seen}"
    return replace(found, verdict=decision.verdict, seen=seen).answer(decision.question, decision.figures)


# -- what is no difference, and what a row is --------------------------------------------------------------------------


class Explained:
    """What the backend and its converted layers explain: dtypes, modules, and whose work follows from numbers."""

    def __init__(self, ledgers: TwoLedgers) -> None:
        backend, reference, fp8 = backend_type(ledgers.backend), ledgers.reference, ledgers.fp8
        self.backend = ledgers.backend
        self.dtypes = not backend.through_accelerate
        """Whether dtypes outside FP8 are compared."""
        self.other_modules = backend.other_modules or not (reference.watched and fp8.watched)
        """Whether modules, products and operators are others by design, or were not watched."""
        self.routed = ledgers.routed()
        """Modules whose work follows from numbers that the model computes."""
        self.stepped_by_both = reference.optimizer.members.keys() & fp8.optimizer.members.keys()
        linears = set(fp8.linears)
        self.linears = linears.union(reference.linears)
        libraries = {
            name
            for name, kind in fp8.classes.items()
            if kind.startswith(LIBRARIES) and not reference.classes.get(name, "").startswith(LIBRARIES)
        }
        multiplies = {
            owned.owner for owned in fp8.products if owned.product.phase != EVALUATION and owned.product.kind == FP8
        }
        # A Linear in whose place multiplies FP8 is an FP8 layer, of whatever class.
        own = {enclosing(owner, linears) for owner in multiplies}
        self.layers = {*fp8.fp8_layers, *libraries, *filter(None, own)}
        self._inside = tuple(f"{name}." for name in self.layers)
        self.functions = {owner for owner in multiplies if not self.owner(owner)}
        """Modules that multiply in FP8 and are no layers: they call a function with a weight, which may be that of a
        Linear that is then not called."""
        self._unused = linears - fp8.classes.keys()

    def caller(self, name: str) -> str:
        """``name``; of a Linear that the FP8 arm does not call, the module that multiplies with its weight in FP8."""
        parents = [parent for parent in self.functions if not parent or name.startswith(f"{parent}.")]
        return max(parents, key=len, default=name) if name in self._unused else name

    def inside(self, name: str) -> bool:
        """Whether a module or weight lies inside a converted layer."""
        return name.startswith(self._inside)

    def owner(self, name: str) -> bool:
        """Whether what a module owns is a converted layer's, or an FP8 library's."""
        return name in self.layers or self.inside(name)


def outermost(names: Collection[str]) -> list[str]:
    """The names that lie inside no other of them."""
    chosen = {""} if "" in names else set(names)
    return sorted(name for name in chosen if enclosing(name.rpartition(".")[0], chosen - {name}) is None)


def size(shape: Sequence[int]) -> str:
    """``4x128``; ``one number`` for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "one number"


def differ(
    code: Code, about: str, values: Iterable[str], questions: tuple[str, ...] | None = None, **given: Any
) -> Difference:
    """A difference in the words of its code. ``values``: the reference's and the FP8 arm's. ``given``: what the words
    leave open."""
    reference, fp8 = values
    of_conversion = isinstance(code, L)
    found = finding(code, reference, fp8, Verdict.FAIL if of_conversion else Verdict.INVALID, about=about, **given)
    usual = QUESTIONS.get(code, (LAYERS,) if of_conversion else EVERY)
    return Difference(**vars(found), questions=usual if questions is None else questions)


Kinds = Counter[tuple[str, ...]]
"""How many of each kind; a kind is told from coarse to fine, as an operator, its dtype, and the numbers it is given."""
Facts = Mapping[str, str | Kinds]
"""What a fact is about -> its value in one arm."""


@dataclass(frozen=True)
class Row:
    """Facts that both arms must share."""

    read: Callable[[ArmLedger, Explained], Facts]
    codes: tuple[D, ...]
    """Of a difference: in the value, or for each step of its kinds."""
    about: str = "{}"
    """How a fact is called. Those of modules are told of the outermost one, as the others follow from it."""
    of_modules: bool = False
    of_both: bool = False
    """Not compared where one arm does not have it."""

    def __call__(self, reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
        one, two = (self.read(arm, explained) for arm in (reference, fp8))
        codes = self.codes if explained.dtypes else [code for code in self.codes if code not in OF_DTYPES]
        other = {}
        for name in dict.fromkeys([*one, *two]):
            nothing: str | Kinds = "none" if isinstance(one.get(name, two.get(name)), str) else Counter()
            found = _compared(codes, one.get(name, nothing), two.get(name, nothing))
            if found and not (self.of_both and (name not in one or name not in two)):
                other[name] = found
        for name in outermost(other) if self.of_modules else other:
            code, told = other[name]
            yield differ(code, self.about.format(name or "the model itself"), told)


def _compared(codes: Sequence[D], one: str | Kinds, two: str | Kinds) -> tuple[D, tuple[str, str]] | None:
    """The first step in which two values differ: its code, and both in words."""
    if isinstance(one, str) or isinstance(two, str):
        return (codes[0], (str(one), str(two))) if one != two else None
    for step, code in enumerate(codes, 1):
        ours, theirs = (_up_to(step, each) for each in (one, two))
        # What could not be read in one arm is no difference.
        if ours != theirs and (step == 1 or all(any(len(k) >= step for k in n) for n in (one - two, two - one))):
            other = sorted(kind for kind in ours.keys() | theirs.keys() if ours[kind] != theirs[kind])[:4]
            told = [", ".join(f"{n[kind]} x {kind}" for kind in other if n[kind]) for n in (ours, theirs)]
            return code, (told[0] or "none of them", told[1] or "none of them")
    return None


def _up_to(step: int, kinds: Kinds) -> Counter[str]:
    result: Counter[str] = Counter()
    for kind, count in kinds.items():
        result[" ".join(kind[:step])] += count
    return result


# -- what a conversion answers for ------------------------------------------------------------------------------------


def _lost(code: L, names: Sequence[str], expected: str, seen: str) -> Differences:
    """What the FP8 arm lacks; nothing where that is nothing. ``expected``: with a place for the first name."""
    if names:
        values = expected.format(names[0]), f"{seen}: {some(list(names))}"
        yield differ(code, names[0], values, count=len(names))


def weights_kept(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """Every parameter and buffer of the FP8 arm is after the conversion what it was before. New buffers are no
    difference: FP8 layers keep scales."""
    kept = {n: w for n, w in fp8.before.items() if not (w.buffer and explained.owner(n.rpartition(".")[0]))}
    gone = [name for name in kept if name not in fp8.after and not explained.other_modules]
    yield from _lost(L.WEIGHT_GONE, gone, "{}, as before the conversion", "not in the converted model")
    for name, was in kept.items():
        for code, *values in _changes(was, fp8.after[name]) if name in fp8.after else ():
            yield differ(code, name, (f"{name}: {value}" for value in values))


def _changes(was: Weight, now: Weight) -> Iterator[tuple[L, str, str]]:
    if list(was.shape) != list(now.shape):
        yield L.WEIGHT_RESHAPED, size(was.shape), size(now.shape)
    elif was.dtype != now.dtype and now.digest:
        yield L.WEIGHT_CAST, was.dtype, now.dtype
    elif was.digest and now.digest and was.digest != now.digest:
        yield L.WEIGHT_CHANGED, f"content {was.digest}", f"content {now.digest}"
    if was.trained != now.trained:
        code = L.TRAINS_FROZEN if now.trained else L.FREEZES_TRAINED
        yield code, f"requires_grad {was.trained}", f"requires_grad {now.trained}"
    if was.same_as and was.same_as != now.same_as:
        yield L.UNTIED, f"the same tensor as {was.same_as}", "a tensor of its own"
    if now.hooks < was.hooks:
        yield L.HOOK_GONE, f"{was.hooks} hook(s)", f"{now.hooks} hook(s)"


def weights_trained(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """What the reference's optimizer steps, the FP8 arm's steps, and nothing else."""
    wanted, stepped = reference.optimizer.members, fp8.optimizer.members
    missing, added = sorted(wanted.keys() - stepped.keys()), sorted(stepped.keys() - wanted.keys())
    yield from _lost(L.NOT_IN_OPTIMIZER, missing, f"all {len(wanted)} weights that BF16 trains", "never stepped")
    if added and not missing:
        name = added[0]
        yield differ(D.OTHER_WEIGHTS_TRAINED, name, (f"{name} is in no optimizer", f"stepped: {some(added)}"))


def layers_called(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """A converted layer that the reference's model calls is called. A layer whose rows a router chooses may rest."""
    ranks = zip(reference.of_ranks(), fp8.of_ranks(), strict=False)
    for rank, (ours, theirs) in enumerate(ranks if not explained.other_modules else ()):
        wanted, called = {c.module for c in ours if c.phase == "forward"}, {c.module for c in theirs}
        passed = [name for name in fp8.fp8_layers if name in wanted - called and name not in explained.routed]
        if passed:
            where = f" on rank {rank}" if rank else ""
            yield from _lost(L.PASSED_BY, passed, "{} is called" + where, f"never called{where}")
            return


def gradients_there(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """A weight that has a gradient in the reference has one. An expert without rows has none."""
    if not explained.other_modules and fp8.stepped and reference.stepped:
        lost = sorted(set(reference.gradients) - set(fp8.gradients))
        missing = [name for name in lost if name.rpartition(".")[0] not in explained.routed]
        yield from _lost(L.NO_GRADIENT, missing, "{} has a gradient when the optimizer steps", "no gradient")


# -- the step as a whole ----------------------------------------------------------------------------------------------


def _model(arm: ArmLedger, explained: Explained) -> Facts:
    """What ``build()`` gives. Not compared where the library loads its own, quantised model."""
    brought = backend_type(explained.backend).brings_model
    return {
        name: f"{name}: {w.dtype} {size(w.shape)}, content {w.digest}, requires_grad {w.trained}"
        for name, w in (arm.before.items() if not brought else ())
    }


def entered_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """The batch, and what entered each outermost module call: number, mode, shapes, dtypes and content."""
    other_batch = list(_tensors("the batch", reference.batch, fp8.batch, explained, D.OTHER_DATA))
    yield from other_batch
    if OUTSIDE in explained.routed:
        return
    # Training does not depend on how the arms evaluate; their times do.
    for phase, word, questions in (("forward", "training", EVERY), (EVALUATION, "evaluating", (SPEED, MEMORY))):
        calls = [[call for call in arm.entered if call.phase == phase] for arm in (reference, fp8)]
        if len(calls[0]) != len(calls[1]) and not explained.other_modules:
            counts = (f"{len(each)}: {some([call.module or 'the model' for call in each])}" for each in calls)
            yield differ(D.OTHER_WORK, f"outermost module calls while {word}", counts, questions)
            return
        for call, other in zip(*calls, strict=False):
            name, code = call.module or "the model", D.OTHER_DATA if other_batch else D.OTHER_INPUTS
            sized, exact = call.module not in explained.routed, phase == "forward"
            for each in _tensors(f"what enters {name}", call.tensors, other.tensors, explained, code, sized, exact):
                yield replace(each, questions=tuple(one for one in each.questions if one in questions))
            if call.gradients != other.gradients:
                states = ("on" if each.gradients else "off" for each in (call, other))
                yield differ(D.OTHER_MODE, f"autograd in the call of {name}", states, questions)


def _tensors(
    where: str,
    one: Sequence[TensorNote],
    two: Sequence[TensorNote],
    explained: Explained,
    code: D,
    sized: bool = True,
    exact: bool = True,
) -> Differences:
    """``sized``: whether their shapes are compared; ``exact``: and their content, where it does not come of products,
    which FP8 rounds otherwise."""
    ours, theirs = (Kinds((f"{n.dtype} " * explained.dtypes + size(n.shape),) for n in arm) for arm in (one, two))
    # The Trainer passes on what its own arguments ask for beside the batch.
    if explained.backend.startswith("trainer_"):
        theirs &= ours
    known = [bool(n.digest) for n in one] == [bool(n.digest) for n in two]
    if sized and (other := _compared((D.OTHER_WORK,), ours, theirs)):
        yield differ(other[0], where, other[1])
    elif exact and known and Counter(n.digest for n in one) != Counter(n.digest for n in two):
        yield differ(code, where, (where, f"{where} has other values, in tensors of the same shapes"))


def _switches(arm: ArmLedger, explained: Explained) -> Facts:
    """Global switches inside the forward pass and after the step. Accelerate's autocast is its own."""
    left = ("autocast",) * (not explained.dtypes) + ("autocast", "sdp_enabled") * explained.other_modules
    return {
        name + when: f"{name} = {value}"
        for values, when in ((arm.switches, ""), (arm.switches_after, " after the step"))
        for name, value in values.items()
        if not any(word in name for word in left)
    }


def _passes(arm: ArmLedger, explained: Explained) -> Facts:
    """How often the step goes backward and its optimizer steps."""
    if OUTSIDE in explained.routed:
        return {}
    # Ranks may differ in their numbers of micro-batches, and not in when they step.
    ranks = f", of {1 + len(arm.elsewhere)} ranks together" if arm.elsewhere else ""
    return {f"backward passes in a step{ranks}": str(arm.backward), "optimizer steps in a step": str(arm.stepped)}


def _modes(arm: ArmLedger, explained: Explained) -> Facts:
    """Train or eval of each module that trains."""
    modes: dict[str, set[str]] = {}
    for call in arm.calls:
        if call.phase == "forward" and not explained.inside(call.module):
            modes.setdefault(call.module, set()).add("train" if call.training else "eval")
    return {name: " and ".join(sorted(seen)) for name, seen in modes.items()}


def _optimizer(arm: ArmLedger, explained: Explained) -> Facts:
    """Class, settings by parameter, schedule. Groups may be split otherwise as long as each parameter's settings are
    the same."""
    mine = arm.optimizer
    settings = {
        f"{key} of {name}": f"{key} = {value}"
        for name in sorted(explained.stepped_by_both)
        for key, value in mine.groups[mine.members[name]].items()
    }
    schedule = {f"the schedule's {key}": value for key, value in mine.schedule.items()}
    return {"its class": mine.kind, **settings, **schedule}


def updates_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """The weights after some steps in which both arms' optimizers got the same gradients."""
    one, two = reference.updates, fp8.updates
    same = one.steps == two.steps > 0 and one.size == two.size and one.sketches.keys() == two.sketches.keys()
    finite = math.isfinite(reference.loss) and math.isfinite(fp8.loss)
    # Weights of another dtype, and those that only one arm trains, have rows of their own.
    kinds = [{n: arm.after[n].dtype for n in one.sketches if n in arm.after} for arm in (reference, fp8)]
    if explained.other_modules or not (same and finite) or kinds[0] != kinds[1] or reference.gradients != fp8.gradients:
        return
    other = {
        name: _squares(moved, two.sketches[name]) for name, moved in one.sketches.items() if moved != two.sketches[name]
    }
    every = sum(_squares(sketch, sketch)[1] for sketch in one.sketches.values()) if other else 1.0
    apart = math.sqrt(sum(apart for apart, _ in other.values()) / every) if every else math.inf
    if apart > OTHER:
        worst = max(other, key=lambda name: other[name][0] / max(other[name][1], 1e-30))
        expected = f"the updates that BF16's optimizer makes of the same seeded gradients in {one.steps} steps"
        seen = f"other updates of {len(other)} of {len(one.sketches)} weights, {apart:.1%} off: {some([worst, *other])}"
        yield differ(D.OTHER_UPDATES, f"updates of {worst}", (expected, seen))


def _squares(one: str, two: str) -> tuple[float, float]:
    """|one - two|^2 and |one|^2."""
    import numpy as np

    ours, theirs = (np.array(of_text(text), dtype=np.float64) for text in (one, two))
    return float(((ours - theirs) ** 2).sum()), float((ours**2).sum())


def clipped_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """The share of the gradients' norm that clipping leaves."""
    one, two = reference.norm_kept, fp8.norm_kept
    if min(one, two) > 0 and max(one, two) / min(one, two) > CLIPS:
        about = "the gradients' norm between the backward pass and the optimizer's step"
        expected = f"{one:.3g} times the norm at the end of the backward pass"
        yield differ(D.OTHER_CLIPPING, about, (expected, f"{two:.3g} times it"))


def random_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """The draws of random numbers, and the generators' state after the step: the first that differs. A router that
    sends other rows through a dropout draws other numbers. Draws of FP8 layers alone, as of casts that round at random,
    count where others follow them, from another state."""
    if explained.other_modules or explained.routed or reference.random == fp8.random:
        return
    drawing = {draw.owner for draw in reference.draws}
    others = [draw for draw in fp8.draws if draw.owner in drawing or not explained.owner(draw.owner)]
    end = ", and the generator's state {} after them" * (len(others) == len(fp8.draws))
    one, two = (
        [
            f"{draw.operator} of {size(draw.shape)} by {draw.owner or 'the model itself'} in the {draw.phase} pass, "
            f"draw {number}, from the generator's state {draw.state}"
            for number, draw in enumerate(draws, 1)
        ]
        + [f"{len(draws)} draws" + end.format(state)]
        for draws, state in ((reference.draws, reference.random), (others, fp8.random))
    )
    for ours, theirs in zip(one, two, strict=False):
        if ours != theirs:
            yield differ(D.OTHER_RANDOM_NUMBERS, "random numbers", (ours, theirs))
            return


# -- the work inside the step -----------------------------------------------------------------------------------------


def _calls(arm: ArmLedger, explained: Explained) -> Facts:
    """Number and input shape of each module's calls in training. An arm may evaluate with other layers than it trains
    with."""
    calls: dict[str, Kinds] = {}
    for rank, noted in enumerate(arm.of_ranks() if not explained.other_modules else ()):
        for call in noted:
            name = call.module
            open_ = name in explained.routed or explained.inside(name) or explained.caller(name) != name
            if call.phase == "forward" and not open_:
                kind = f"forward of {size(call.shape)}" + (f" on rank {rank}" if rank else "")
                calls.setdefault(name, Counter())[(kind,)] += call.count
    return calls


def products_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """Matrix products of modules that are no FP8 layers: number and sizes, then precision. FP8 may take a product's
    place, and may compute gradients that nobody needs."""
    one, two = (_products(arm, explained) for arm in (reference, fp8))
    for owner in dict.fromkeys([*one, *two]):
        ours, theirs = one.get(owner, Counter()), two.get(owner, Counter())
        for sizes, kind in [each for each in theirs if each[1] == f"in {FP8}"]:
            count, places = theirs.pop((sizes, kind)), ours - theirs
            for place in [each for each in places if each[0] == sizes]:
                taken = min(count, places[place])
                theirs[place], count = theirs[place] + taken, count - taken
        found = _compared((D.OTHER_WORK, D.OTHER_PRECISION)[: 1 + explained.dtypes], ours, theirs)
        if found:
            yield differ(found[0], f"matrix products of {owner or 'the model itself'}", found[1])


def _products(arm: ArmLedger, explained: Explained) -> dict[str, Kinds]:
    """Owner -> sizes with the phase, as ``forward 48x64x512``, and precision -> products."""
    found: dict[str, Kinds] = {}
    for owned in () if explained.other_modules else arm.products:
        product, owner = owned.product, explained.caller(owned.owner)
        left = owned.owner in explained.routed or explained.owner(owner)
        if not left and product.phase not in (RECOMPUTE, EVALUATION):
            small, large = sorted(product.outer)
            kind = f"{product.phase} {small}x{product.inner}x{large}", f"in {product.kind}"
            found.setdefault(owner, Counter())[kind] += product.batch
    return found


def _operators(arm: ArmLedger, explained: Explained) -> Facts:
    """All other operators of the forward pass, by module: their number, their dtypes, then the numbers they are given,
    as a dropout's rate. A Linear's own are left out: how it adds its bias depends on the layout of its input."""
    left = {*explained.linears, *explained.routed, *explained.functions}
    return {
        owner: Kinds({tuple(kind.split()): count for kind, count in operators.items()})
        for owner, operators in (arm.operators.items() if not explained.other_modules else ())
        if owner not in left and not explained.owner(owner)
    }


def _waits(arm: ArmLedger, explained: Explained) -> Facts:
    """How often the host waits, as ``.item()`` has it wait for a value. An FP8 layer's own waits are its library's;
    Accelerate has waits of its own."""
    return {
        f"{owner or 'the model itself'} in the {phase} part": f"{count} waits"
        for owner, phases in (arm.waits.items() if explained.dtypes and not explained.other_modules else ())
        for phase, count in phases.items()
        if phase != RECOMPUTE and owner not in explained.routed and not explained.owner(owner)
    }


def recomputed_alike(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """Which parts of the model are computed again in the backward pass. Where a recomputation ends follows from what
    the layers save, so that the last modules of a part may be missing."""
    one, two = ({c.module for c in arm.calls if c.phase == RECOMPUTE and c.outermost} for arm in (reference, fp8))
    for ours, theirs in () if explained.other_modules else ((one, two), (two, one)):
        other = [name for name in outermost(ours - theirs) if not _goes_on_in(name, theirs, explained)]
        if other:
            states = ("recomputed", "not recomputed")[:: 1 if ours is one else -1]
            about = f"recomputation of {some([name or 'the model' for name in other])}"
            yield differ(D.OTHER_RECOMPUTATION, about, states)


def _goes_on_in(name: str, others: Collection[str], explained: Explained) -> bool:
    """Whether the other arm recomputes the same part of the model, as far as it needs to."""
    parent = name.rpartition(".")[0]
    if name in explained.routed or not parent:
        return name in explained.routed or bool(others)
    return any(other == parent or other.startswith((f"{parent}.", f"{name}.")) for other in others)


def recomputed_the_same(reference: ArmLedger, fp8: ArmLedger, explained: Explained) -> Differences:
    """That recomputation draws the random numbers of the first forward pass again, in each arm by itself."""
    one, two = (list(arm.recomputed_otherwise) for arm in (reference, fp8))
    if not explained.other_modules and bool(one) != bool(two):
        where = f"other random numbers at {some([name or 'the model' for name in two or one])}"
        told = (where if arm else "the random numbers of the first forward pass again" for arm in (one, two))
        found = differ(D.RECOMPUTED_OTHERWISE, f"recomputation of {(two or one)[0]}", told)
        yield replace(found, verdict=Verdict.FAIL) if two else found


def _sums(arm: ArmLedger, explained: Explained) -> Facts:
    """The type in which most of what the backward pass sums over the ranks travels: that of gradients."""
    bytes_of = Counter[str]()
    for each in arm.wire if explained.dtypes and not explained.other_modules else ():
        if each.phase == "backward" and each.operation in ("all-reduce", "reduce-scatter"):
            bytes_of[each.dtype] += each.bytes * each.count
    return {"gradients on their way between ranks": max(bytes_of, key=bytes_of.__getitem__)} if bytes_of else {}


def _loss(arm: ArmLedger, explained: Explained) -> Facts:
    return {"the loss": arm.loss_dtype} if explained.dtypes and not explained.other_modules else {}


ROWS: tuple[Callable[[ArmLedger, ArmLedger, Explained], Iterable[Difference]], ...] = (
    # What a conversion answers for.
    weights_kept,
    weights_trained,
    layers_called,
    # Causes before what follows from them.
    Row(_model, (D.OTHER_MODEL,)),
    entered_alike,
    Row(_switches, (D.OTHER_SWITCH,)),
    Row(_modes, (D.OTHER_MODE,), about="train or eval mode of {}", of_modules=True, of_both=True),
    recomputed_alike,
    recomputed_the_same,
    Row(_passes, (D.OTHER_PASSES,)),
    Row(_optimizer, (D.OTHER_OPTIMIZER,)),
    updates_alike,
    Row(_calls, (D.OTHER_WORK,), about="calls of {}", of_modules=True),
    products_alike,
    Row(_operators, (D.OTHER_WORK, *OF_DTYPES), about="operators of {}"),
    Row(_sums, (D.OTHER_PRECISION,), of_both=True),
    Row(_loss, (D.OTHER_PRECISION,)),
    clipped_alike,
    Row(_waits, (D.OTHER_WAITS,), about="waits of {}"),
    gradients_there,
    random_alike,
)
"""Each row compares one class of facts. The first difference is the one that is reported."""


# -- what both arms do alike ------------------------------------------------------------------------------------------


def evaluated_otherwise(ledgers: TwoLedgers) -> list[str]:
    """Modules that one arm alone calls while it evaluates."""
    arms = (ledgers.reference, ledgers.fp8)
    one, two = ({c.module for c in arm.calls if c.phase == EVALUATION} for arm in arms)
    return outermost(one ^ two) if one and two else []


def never_called(ledgers: TwoLedgers) -> list[str]:
    """Converted layers that neither arm calls in training, on any rank."""
    called = {c.module for arm in (ledgers.reference, ledgers.fp8) for calls in arm.of_ranks() for c in calls}
    return [name for name in ledgers.fp8.fp8_layers if name not in called]
