"""The rows of the ledger: which facts of one step both arms must share, and how each is read. Pure.

A row reads facts of each arm, and :func:`alike` compares them. Kinds of work are told from coarse to fine, as the sizes
of products, then their precision: the first step at which the arms differ says which code it is. What FP8 may change in
one direction alone, and what a conversion did to the weights, is compared by a function of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import D, L
from pytest_fp8.floats import of_text
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.differences import (
    EVERY,
    FORGETS,
    GATHERED,
    KEEP,
    LAYERS,
    LOSS,
    MEMORY,
    OUTSIDE,
    SPEED,
    Difference,
    Explained,
    differ,
    outermost,
    size,
)
from pytest_fp8.questions.ledger.evidence import ArmLedger, Draw, TensorNote, TwoLedgers, Weight
from pytest_fp8.recipes import RECOMPUTE, backend_type
from pytest_fp8.verdicts import Verdict

CLIPS = 1.5
"""Gradients are clipped in one arm alone where the shares that clipping leaves of their norms differ by this factor
(docs/limits.md)."""
OTHER = 0.01
"""Share of all updates by which the arms may differ: sums that are added in another order move single values."""

Row = Callable[[TwoLedgers, Explained], Iterator[Difference]]
Kinds = Counter[tuple[str, ...]]
"""How many of each kind; a kind is told from coarse to fine, as an operator, its dtype, and the numbers it is given."""


@dataclass(frozen=True)
class Fact:
    """One fact of one arm."""

    about: str
    value: str | Kinds
    codes: tuple[D, ...]
    """Of a difference: in the value, or for each step of its kinds."""
    questions: tuple[str, ...] = EVERY
    cause: str = ""
    module: str | None = None
    """The module that it is of, where those inside it follow: the outermost one is told."""
    of_both: bool = False
    """Not compared where one arm does not have it."""


Read = Callable[[ArmLedger, Explained], Iterable[Fact]]


def alike(read: Read) -> Row:
    """The row of facts that both arms must share."""

    def row(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
        one, two = ({f.about: f for f in read(arm, explained)} for arm in (ledgers.reference, ledgers.fp8))
        other = []
        for about in dict.fromkeys([*one, *two]):
            fact = one.get(about) or two[about]
            ours, theirs = (arm[about].value if about in arm else _nothing(fact.value) for arm in (one, two))
            found = _compared(fact.codes, ours, theirs)
            if found and not (fact.of_both and (about not in one or about not in two)):
                other.append((fact, *found))
        top = outermost([fact.module for fact, *_ in other if fact.module is not None])
        for fact, code, told in other:
            if fact.module is None or fact.module in top:
                yield differ(code, fact.about, told, fact.questions, fact.cause)

    return row


def _nothing(value: str | Kinds) -> str | Kinds:
    return "none" if isinstance(value, str) else Counter()


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


def weights_kept(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Every parameter and buffer of the FP8 arm is after the conversion what it was before. New buffers are no
    difference: FP8 layers keep scales."""
    before, after = ledgers.fp8.before, ledgers.fp8.after
    of_layers = {n for n, was in before.items() if was.buffer and explained.owner(n.rpartition(".")[0])}
    gone = [n for n in before if n not in after and n not in of_layers and not explained.other_modules]
    if gone:
        no_bias = (
            "the conversion put layers in place of the old ones that have no bias",
            "make the new layer with bias=old.bias is not None, and take the bias over",
        )
        values = f"{gone[0]}, {_kind(before[gone[0]])}", f"not in the converted model: {some(gone)}"
        why = no_bias if _biases(gone) else ("", "")
        yield differ(L.WEIGHT_GONE, gone[0], values, (LAYERS,), *why, count=len(gone))
    for name, was in before.items():
        if name not in after or name in of_layers:
            continue
        now = after[name]
        others = (other for other, its in before.items() if other != name and its.digest == now.digest)
        swapped = next(others, "") if now.digest else ""
        for code, reference, fp8 in _changes(was, now, swapped):
            cause = f"the conversion swapped weights: {name} has what was {swapped}'s"
            cause = cause if swapped and code is L.WEIGHT_CHANGED else ""
            yield differ(code, name, (f"{name}: {reference}", f"{name}: {fp8}"), (LAYERS,), cause)


def _kind(weight: Weight) -> str:
    return f"{weight.dtype} {size(weight.shape)}"


def _biases(names: Sequence[str]) -> bool:
    return all(name.rpartition(".")[2] == "bias" for name in names)


def _changes(was: Weight, now: Weight, swapped: str) -> Iterator[tuple[L, str, str]]:
    """``swapped``: the parameter whose values this one has now."""
    if list(was.shape) != list(now.shape):
        yield L.WEIGHT_RESHAPED, size(was.shape), size(now.shape)
    elif was.dtype != now.dtype and now.digest:
        yield L.WEIGHT_CAST, was.dtype, now.dtype
    elif was.digest and now.digest and was.digest != now.digest:
        seen = f"the values of {swapped}" if swapped else f"content {now.digest}"
        yield L.WEIGHT_CHANGED, f"content {was.digest}", seen
    if was.trained != now.trained:
        code = L.TRAINS_FROZEN if now.trained else L.FREEZES_TRAINED
        yield code, f"requires_grad {was.trained}", f"requires_grad {now.trained}"
    if was.same_as and was.same_as != now.same_as:
        yield L.UNTIED, f"the same tensor as {was.same_as}", "a tensor of its own"
    if now.hooks < was.hooks:
        yield L.HOOK_GONE, f"{was.hooks} hook(s)", f"{now.hooks} hook(s)"


def weights_trained(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """What the reference's optimizer steps, the FP8 arm's steps, and nothing else."""
    reference, fp8, after = ledgers.reference.optimizer.members, ledgers.fp8.optimizer.members, ledgers.fp8.after
    if missing := sorted(reference.keys() - fp8.keys()):
        why = ("", "")
        if all(name not in after for name in missing):
            why = "the conversion dropped them: the converted model has none of that name", KEEP
        elif all(name in after and not after[name].trained for name in missing):
            why = FORGETS + "that they were trained, so that no optimizer takes them", KEEP
        elif ledgers.backend == "trainer_torchao":
            why = GATHERED
        values = f"all {len(reference)} weights that BF16 trains", f"never stepped: {some(missing)}"
        yield differ(L.NOT_IN_OPTIMIZER, missing[0], values, (LAYERS, LOSS), *why, count=len(missing))
    elif added := sorted(fp8.keys() - reference.keys()):
        name = added[0]
        yield differ(D.OTHER_WEIGHTS_TRAINED, name, (f"{name} is in no optimizer", f"stepped: {some(added)}"))


def layers_called(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A converted layer that the reference's model calls is called. A layer whose rows a router chooses may rest."""
    if explained.other_modules:
        return
    ranks = zip(ledgers.reference.of_ranks(), ledgers.fp8.of_ranks(), strict=False)
    for rank, (reference, fp8) in enumerate(ranks):
        wanted, called = {c.module for c in reference if c.phase == "forward"}, {c.module for c in fp8}
        passed = [n for n in ledgers.fp8.fp8_layers if n in wanted - called and n not in explained.routed]
        if passed:
            where, name = f" on rank {rank}" if rank else "", passed[0]
            values = f"{name} is called{where}", f"never called{where}: {some(passed)}"
            yield differ(L.PASSED_BY, name, values, (LAYERS,), count=len(passed), where=where)
            return


def gradients_there(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """A weight that has a gradient in the reference has one. An expert without rows has none."""
    if explained.other_modules or not ledgers.fp8.stepped or not ledgers.reference.stepped:
        return
    have = set(ledgers.fp8.gradients)
    lost = set(ledgers.reference.gradients) - have
    missing = sorted(name for name in lost if name.rpartition(".")[0] not in explained.routed)
    if missing:
        of_bias = _biases(missing) and any(f"{bias.removesuffix('bias')}weight" in have for bias in missing)
        cause = "the FP8 layer has its bias and does not add it, or its backward pass gives the bias no gradient"
        values = f"{missing[0]} has a gradient when the optimizer steps", f"no gradient: {some(missing)}"
        why = cause if of_bias else ""
        yield differ(L.NO_GRADIENT, missing[0], values, (LAYERS,), why, count=len(missing))


# -- the step as a whole ----------------------------------------------------------------------------------------------


def _model(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """What ``build()`` gives. Not compared where the library loads its own, quantised model."""
    if not backend_type(explained.backend).brings_model:
        for name, weight in arm.before.items():
            told = f"{name}: {_kind(weight)}, content {weight.digest}, requires_grad {weight.trained}"
            yield Fact(name, told, (D.OTHER_MODEL,), (LAYERS, LOSS))


def entered_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The batch, and what entered each outermost module call: number, mode, shapes, dtypes and content."""
    one, two = ledgers.reference, ledgers.fp8
    other_batch = list(_tensors("the batch", (one.batch, two.batch), explained, D.OTHER_DATA))
    yield from other_batch
    if OUTSIDE in explained.routed:
        return
    # Training does not depend on how the arms evaluate; their times do.
    for phase, word, questions in (("forward", "training", EVERY), (EVALUATION, "evaluating", (SPEED, MEMORY))):
        calls = [[call for call in arm.entered if call.phase == phase] for arm in (one, two)]
        if len(calls[0]) != len(calls[1]) and not explained.other_modules:
            counts = (f"{len(each)}: {some([call.module or 'the model' for call in each])}" for each in calls)
            yield differ(D.OTHER_WORK, f"outermost module calls while {word}", counts, questions)
            return
        for call, other in zip(*calls, strict=False):
            name, code = call.module or "the model", D.OTHER_DATA if other_batch else D.OTHER_INPUTS
            tensors = call.tensors, other.tensors
            sized, exact = call.module not in explained.routed, phase == "forward"
            for found in _tensors(f"what enters {name}", tensors, explained, code, sized, exact):
                yield replace(found, questions=tuple(each for each in found.questions if each in questions))
            if call.gradients != other.gradients:
                states = ("on" if each.gradients else "off" for each in (call, other))
                yield differ(D.OTHER_MODE, f"autograd in the call of {name}", states, questions)


def _tensors(
    where: str,
    arms: tuple[Sequence[TensorNote], Sequence[TensorNote]],
    explained: Explained,
    code: D,
    sized: bool = True,
    exact: bool = True,
) -> Iterator[Difference]:
    """``sized``: whether their shapes are compared; ``exact``: and their content, where it does not come of products,
    which FP8 rounds otherwise."""
    one, two = (Kinds((f"{n.dtype} " * explained.dtypes + size(n.shape),) for n in arm) for arm in arms)
    # The Trainer passes on what its own arguments ask for beside the batch.
    if sized and explained.backend.startswith("trainer_"):
        two &= one
    other = _compared((D.OTHER_WORK,), one, two) if sized else None
    told = {tuple(bool(note.digest) for note in arm) for arm in arms}
    if other:
        yield differ(other[0], where, other[1])
    elif exact and len(told) == 1 and len({frozenset(Counter(n.digest for n in arm).items()) for arm in arms}) == 2:
        yield differ(code, where, (where, f"{where} has other values, in tensors of the same shapes"), (LOSS,))


def _switches(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """Global switches inside the forward pass and after the step. Accelerate's autocast is its own."""
    for values, when in ((arm.switches, ""), (arm.switches_after, " after the step")):
        for name, value in values.items():
            own = name.startswith("autocast") and not explained.dtypes
            if not (own or (explained.other_modules and ("autocast" in name or "sdp_enabled" in name))):
                yield Fact(name + when, f"{name} = {value}", (D.OTHER_SWITCH,))


def _passes(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """How often the step goes backward and its optimizer steps."""
    if OUTSIDE not in explained.routed:
        # Ranks may differ in their numbers of micro-batches, and not in when they step.
        ranks = f", of {1 + len(arm.elsewhere)} ranks together" if arm.elsewhere else ""
        yield Fact(f"backward passes in a step{ranks}", str(arm.backward), (D.OTHER_PASSES,))
        yield Fact("optimizer steps in a step", str(arm.stepped), (D.OTHER_PASSES,))


def _modes(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """Train or eval of each module that trains."""
    modes: dict[str, set[str]] = {}
    for call in arm.calls:
        if call.phase == "forward" and not explained.inside(call.module):
            modes.setdefault(call.module, set()).add("train" if call.training else "eval")
    cause = "eval() in one arm alone: dropout is off there, and running statistics stand still"
    for name, seen in modes.items():
        about, told = f"train or eval mode of {name or 'the model'}", " and ".join(sorted(seen))
        yield Fact(about, told, (D.OTHER_MODE,), cause=cause, module=name, of_both=True)


def _optimizer(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """Class, settings by parameter, schedule. Groups may be split otherwise as long as each parameter's settings are
    the same."""
    mine, other = arm.optimizer, ((D.OTHER_OPTIMIZER,), (LAYERS, LOSS))
    yield Fact("its class", mine.kind, *other)
    for name in sorted(explained.stepped_by_both):
        for key, value in mine.groups[mine.members[name]].items():
            yield Fact(f"{key} of {name}", f"{key} = {value}", *other)
    for key, value in mine.schedule.items():
        yield Fact(f"the schedule's {key}", value, *other)


def updates_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The weights after some steps in which both arms' optimizers got the same gradients."""
    one, two = ledgers.reference.updates, ledgers.fp8.updates
    same = one.steps == two.steps > 0 and one.size == two.size and one.digests.keys() == two.digests.keys()
    finite = math.isfinite(ledgers.reference.loss) and math.isfinite(ledgers.fp8.loss)
    # Weights of another dtype, and those that only one arm trains, have rows of their own.
    kinds = [{n: arm.after[n].dtype for n in one.digests if n in arm.after} for arm in (ledgers.reference, ledgers.fp8)]
    trained = kinds[0] == kinds[1] and ledgers.reference.gradients == ledgers.fp8.gradients
    if explained.other_modules or not (same and finite and trained):
        return
    other = {
        name: _squares(one.sketches[name], two.sketches[name])
        for name, digest in one.digests.items()
        if digest and two.digests[name] and digest != two.digests[name]
    }
    every = sum(_squares(sketch, sketch)[1] for sketch in one.sketches.values()) if other else 1.0
    apart = math.sqrt(sum(apart for apart, _ in other.values()) / every) if every else math.inf
    if apart > OTHER:
        worst = max(other, key=lambda name: other[name][0] / max(other[name][1], 1e-30))
        expected = f"the updates that BF16's optimizer makes of the same seeded gradients in {one.steps} steps"
        seen = f"other updates of {len(other)} of {len(one.digests)} weights, {apart:.1%} off: {some([worst, *other])}"
        yield differ(D.OTHER_UPDATES, f"updates of {worst}", (expected, seen), (LAYERS, LOSS))


def _squares(one: str, two: str) -> tuple[float, float]:
    """|one - two|^2 and |one|^2."""
    import numpy as np

    ours, theirs = (np.array(of_text(text), dtype=np.float64) for text in (one, two))
    return float(((ours - theirs) ** 2).sum()), float((ours**2).sum())


def _loss(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """The loss's dtype."""
    if explained.dtypes and not explained.other_modules:
        yield Fact("the loss", arm.loss_dtype, (D.OTHER_PRECISION,))


def clipped_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The share of the gradients' norm that clipping leaves."""
    one, two = ledgers.reference.norm_kept, ledgers.fp8.norm_kept
    if min(one, two) > 0 and max(one, two) / min(one, two) > CLIPS:
        about = "the gradients' norm between the backward pass and the optimizer's step"
        expected = f"{one:.3g} times the norm at the end of the backward pass"
        yield differ(D.OTHER_CLIPPING, about, (expected, f"{two:.3g} times it"), (LAYERS, LOSS))


def random_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The generators' state after the step, and the first draw that differs. A router that sends other rows through a
    dropout draws other numbers."""
    if explained.other_modules or explained.routed or ledgers.reference.random == ledgers.fp8.random:
        return
    one, two = list(ledgers.reference.draws), list(ledgers.fp8.draws)
    same = (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    index = next(same, min(len(one), len(two)))
    first, other = (draws[index] if index < len(draws) else None for draws in (one, two))
    told, cause = [_drawn(draw, index) for draw in (first, other)], ""
    if told[0] == told[1]:
        told = [f"{told[0]}, and {state} state of the generator" for state in ("one", "another")]
        cause = "the generator was seeded again inside the step (torch.manual_seed), or something that is no operator "
        cause += "of torch's drew from it"
        if first and first.phase == RECOMPUTE:
            cause = "recomputation draws other numbers than its forward pass: it does not restore the generator "
            cause += "(checkpoint(..., preserve_rng_state=False)), or a generator is seeded again inside the step"
    where = first or other
    about = f"random numbers of {where.owner or 'the model itself'}" if where else "random numbers"
    yield differ(D.OTHER_RANDOM_NUMBERS, about, told, (LAYERS, LOSS), cause)


def _drawn(draw: Draw | None, index: int) -> str:
    if draw is None:
        return f"{index} draws"
    by = f"by {draw.owner or 'the model itself'} in the {draw.phase} pass"
    return f"{draw.operator} of {size(draw.shape)} {by}, draw {index + 1}"


# -- the work inside the step -----------------------------------------------------------------------------------------


def _calls(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """Number and input shape of each module's calls in training. An arm may evaluate with other layers than it trains
    with."""
    for rank, noted in enumerate(arm.of_ranks() if not explained.other_modules else ()):
        calls: dict[str, Kinds] = {}
        for call in noted:
            name = call.module
            open_ = name in explained.routed or explained.inside(name) or explained.caller(name) != name
            if call.phase == "forward" and not open_:
                calls.setdefault(name, Counter())[(f"forward of {size(call.shape)}",)] += call.count
        for name, each in calls.items():
            about = f"calls of {name or 'the model'}" + (f" on rank {rank}" if rank else "")
            yield Fact(about, each, (D.OTHER_WORK,), module=name)


def products_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Matrix products of modules that are no FP8 layers: number and sizes, then precision. FP8 may take a product's
    place, and may compute gradients that nobody needs."""
    one, two = (_products(arm, explained) for arm in (ledgers.reference, ledgers.fp8))
    for owner in dict.fromkeys([*one, *two]):
        ours, theirs = one.get(owner, Counter()), two.get(owner, Counter())
        for sizes, fp8 in [kind for kind in theirs if kind[1] == f"in {FP8}"]:
            count, places = theirs.pop((sizes, fp8)), ours - theirs
            for place in [kind for kind in places if kind[0] == sizes]:
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


def _operators(arm: ArmLedger, explained: Explained) -> Iterator[Fact]:
    """All other operators of the forward pass, by module: their number, their dtypes, then the numbers they are given,
    as a dropout's rate. A Linear's own are left out: how it adds its bias depends on the layout of its input."""
    codes = (D.OTHER_WORK, D.OTHER_PRECISION, D.OTHER_OPERATOR_SETTING)[: None if explained.dtypes else 1]
    for owner, operators in arm.operators.items() if not explained.other_modules else ():
        left = owner in explained.linears or owner in explained.routed or owner in explained.functions
        if not left and not explained.owner(owner):
            kinds = Kinds({tuple(kind.split()): count for kind, count in operators.items()})
            yield Fact(f"operators of {owner or 'the model itself'}", kinds, codes)


def waits_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """How often the host waits, as ``.item()`` has it wait for a value. An FP8 layer's own waits are its library's, and
    so are Accelerate's."""
    one, two = (
        {(owner, phase): n for owner, phases in arm.waits.items() for phase, n in phases.items() if phase != RECOMPUTE}
        for arm in (ledgers.reference, ledgers.fp8)
    )
    for owner, phase in () if explained.other_modules else dict.fromkeys([*one, *two]):
        ours, theirs = (arm.get((owner, phase), 0) for arm in (one, two))
        others = owner in explained.routed or explained.owner(owner) or (theirs > ours and not explained.dtypes)
        if ours != theirs and not others:
            arm = "the reference" if ours > theirs else "the FP8 arm"
            told = (f"{count} waits in the {phase} part, {owner or 'the model itself'}" for count in (ours, theirs))
            yield differ(D.OTHER_WAITS, f"waits in the {phase} part", told, (LAYERS, SPEED), arm=arm)


def recomputed_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Which parts of the model are computed again in the backward pass. Where a recomputation ends follows from what
    the layers save, so that the last modules of a part may be missing."""
    arms = (ledgers.reference, ledgers.fp8)
    one, two = ({c.module for c in arm.calls if c.phase == RECOMPUTE and c.outermost} for arm in arms)
    for ours, theirs in () if explained.other_modules else ((one, two), (two, one)):
        other = [name for name in outermost(ours - theirs) if not _goes_on_in(name, theirs, explained)]
        if other:
            states = ("recomputed", "not recomputed")[:: 1 if ours is one else -1]
            about = f"recomputation of {some([name or 'the model' for name in other])}"
            yield differ(D.OTHER_RECOMPUTATION, about, states, cause="activation checkpointing in one arm alone")


def _goes_on_in(name: str, others: Collection[str], explained: Explained) -> bool:
    """Whether the other arm recomputes the same part of the model, as far as it needs to."""
    parent = name.rpartition(".")[0]
    if name in explained.routed or not parent:
        return name in explained.routed or bool(others)
    return any(other == parent or other.startswith((f"{parent}.", f"{name}.")) for other in others)


def recomputed_the_same(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """That recomputation computes again what the first forward pass did, in each arm by itself."""
    one, two = (list(arm.recomputed_otherwise) for arm in (ledgers.reference, ledgers.fp8))
    if not explained.other_modules and bool(one) != bool(two):
        layers = [name or "the model" for name in two or one]
        same, other = "the values of the first forward pass again", f"other values at {some(layers)}"
        told = [f"recomputation has {other if arm else same}" for arm in (one, two)]
        about, layer = f"recomputation of {layers[0]}", layers[0]
        found = differ(D.RECOMPUTED_OTHERWISE, about, told, (LAYERS, LOSS), layer=layer)
        yield replace(found, verdict=Verdict.FAIL) if two else found


def evaluated_otherwise(ledgers: TwoLedgers) -> list[str]:
    """Modules that one arm alone calls while it evaluates."""
    arms = (ledgers.reference, ledgers.fp8)
    one, two = ({c.module for c in arm.calls if c.phase == EVALUATION} for arm in arms)
    return outermost(one ^ two) if one and two else []


ROWS: tuple[Row, ...] = (
    # What a conversion answers for.
    weights_kept,
    weights_trained,
    layers_called,
    # Causes before what follows from them.
    alike(_model),
    entered_alike,
    alike(_switches),
    alike(_modes),
    recomputed_alike,
    recomputed_the_same,
    alike(_passes),
    alike(_optimizer),
    updates_alike,
    alike(_calls),
    products_alike,
    alike(_operators),
    alike(_loss),
    clipped_alike,
    waits_alike,
    gradients_there,
    random_alike,
)
"""Each row compares one class of facts. The first difference is the one that is reported."""
