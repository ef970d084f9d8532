"""Rows of the ledger about a step as a whole: what enters it, its settings, passes, updates, random numbers. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fp8.codes import D
from pytest_fp8.floats import of_text
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.questions.ledger.differences import (
    EVERY,
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
from pytest_fp8.questions.ledger.evidence import ArmLedger, Entered, TensorNote, TwoLedgers
from pytest_fp8.recipes import RECOMPUTE

CLIPS = 1.5
"""Gradients are clipped in one arm alone where the shares that clipping leaves of their norms differ by this factor
(docs/limits.md)."""
OTHER = 0.01
"""Share of all updates by which the arms may differ: sums that are added in another order move single values."""
SEEDED = (
    "the generator was seeded again inside the step (torch.manual_seed), or something that is no operator of torch's "
    "drew from it"
)
NOT_RESTORED = (
    "recomputation draws other numbers than its forward pass: it does not restore the generator "
    "(checkpoint(..., preserve_rng_state=False)), or a generator is seeded again inside the step"
)

KEPT = (
    "batch(step) sets {names}, which it keeps from call to call: an arm that is asked more often is further on",
    "take the place in the data from the argument: data[step % len(data)]",
)


def entered_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The batch, and what entered each outermost module call: number, mode, shapes, dtypes and content."""
    other_batch = list(_tensors("the batch", ledgers.reference.batch, ledgers.fp8.batch, explained))
    kept = ledgers.reference.kept
    yield from (
        replace(found, cause=KEPT[0].format(names=", ".join(kept)), next_step=KEPT[1]) if kept else found
        for found in other_batch
    )
    if OUTSIDE in explained.routed:
        return
    one, two = (list(arm.entered) for arm in (ledgers.reference, ledgers.fp8))
    # Training does not depend on how the arms evaluate; their times do.
    for phase, word, questions in (("forward", "training", EVERY), (EVALUATION, "evaluating", (SPEED, MEMORY))):
        ours, theirs = ([call for call in calls if call.phase == phase] for calls in (one, two))
        if len(ours) != len(theirs) and not explained.other_modules:
            counts = (f"{len(each)}: {_names(each)}" for each in (ours, theirs))
            yield differ(D.OTHER_WORK, f"outermost module calls while {word}", counts, questions)
            return
        for call, other in zip(ours, theirs, strict=False):
            where = f"what enters {call.module or 'the model'}"
            exact, code = phase == "forward", D.OTHER_DATA if other_batch else D.OTHER_INPUTS
            sized = call.module not in explained.routed
            for found in _tensors(where, call.tensors, other.tensors, explained, exact, sized, code):
                yield replace(found, questions=tuple(each for each in found.questions if each in questions))
            if call.gradients != other.gradients:
                states = ("on" if each.gradients else "off" for each in (call, other))
                yield differ(D.OTHER_MODE, f"autograd in the call of {call.module or 'the model'}", states, questions)


def _names(calls: Sequence[Entered]) -> str:
    return _listed(Counter(call.module or "the model" for call in calls), "{} x{}")


def _tensors(
    where: str,
    ours: Sequence[TensorNote],
    theirs: Sequence[TensorNote],
    explained: Explained,
    exact: bool = True,
    sized: bool = True,
    code: D = D.OTHER_DATA,
) -> Iterator[Difference]:
    def kinds(notes: Sequence[TensorNote]) -> Counter[str]:
        return Counter(size(n.shape) if explained.autocast else f"{n.dtype} {size(n.shape)}" for n in notes)

    one, two = kinds(ours), kinds(theirs)
    lost, added = one - two, two - one
    # The Trainer passes on what its own arguments ask for beside the batch.
    if sized and (lost or (added and not explained.trainer)):
        yield differ(D.OTHER_WORK, where, (_listed(lost or one), _listed(added or two)))
        return
    digests = [[note.digest for note in notes if note.digest] for notes in (ours, theirs)]
    alike = [note.digest != "" for note in ours] == [note.digest != "" for note in theirs]
    if exact and alike and Counter(digests[0]) != Counter(digests[1]):
        yield differ(code, where, (where, f"{where} has other values, in tensors of the same shapes"), (LOSS,))


def _listed(kinds: Counter[str], several: str = "{} ({} times)") -> str:
    return ", ".join(several.format(*each) if each[1] > 1 else each[0] for each in list(kinds.items())[:4])


def passes_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """How often the step goes backward and its optimizer steps."""
    if OUTSIDE in explained.routed:
        return
    # Ranks may differ in their numbers of micro-batches, and not in when they step.
    ranks = 1 + len(ledgers.reference.elsewhere)
    of_all = f", of {ranks} ranks together" if ranks > 1 else ""
    for what, one, two in (
        (f"backward passes in a step{of_all}", ledgers.reference.backward, ledgers.fp8.backward),
        ("optimizer steps in a step", ledgers.reference.stepped, ledgers.fp8.stepped),
    ):
        if one != two:
            yield differ(D.OTHER_PASSES, what, (str(one), str(two)))


def modes_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Train or eval of each module that trains."""
    one, two = (_modes(arm) for arm in (ledgers.reference, ledgers.fp8))
    other = [name for name in one if name in two and one[name] != two[name] and not explained.inside(name)]
    cause = f"eval() in one arm alone ({len(other)} modules): dropout is off there, and running statistics stand still"
    for name in outermost(other):
        words = (" and ".join("train" if on else "eval" for on in sorted(arm[name])) for arm in (one, two))
        yield differ(D.OTHER_MODE, f"train or eval mode of {name or 'the model'}", words, cause=cause)


def _modes(arm: ArmLedger) -> dict[str, set[bool]]:
    modes: dict[str, set[bool]] = {}
    for call in arm.calls:
        if call.phase == "forward":
            modes.setdefault(call.module, set()).add(call.training)
    return modes


def clipped_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The share of the gradients' norm that clipping leaves."""
    one, two = ledgers.reference.norm_kept, ledgers.fp8.norm_kept
    if min(one, two) > 0 and max(one, two) / min(one, two) > CLIPS:
        about = "the gradients' norm between the backward pass and the optimizer's step"
        expected = f"{one:.3g} times the norm at the end of the backward pass"
        yield differ(D.OTHER_CLIPPING, about, (expected, f"{two:.3g} times it"), (LAYERS, LOSS))


def losses_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The loss's dtype."""
    one, two = ledgers.reference.loss_dtype, ledgers.fp8.loss_dtype
    if one != two and not explained.autocast and not explained.other_modules:
        yield differ(D.OTHER_PRECISION, "the loss", (one, two))


def random_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The generators' state after the step, and the first draw that differs. A router that sends other rows through a
    dropout draws other numbers."""
    if not explained.work or explained.routed or ledgers.reference.random == ledgers.fp8.random:
        return
    draws = (ledgers.reference.draws, ledgers.fp8.draws)
    same = (i for i, pair in enumerate(zip(*draws, strict=False)) if pair[0] != pair[1])
    index = next(same, min(map(len, draws)))
    firsts = [each[index] if index < len(each) else None for each in draws]
    told = [
        f"{draw.operator} of {size(draw.shape)} by {draw.owner or 'the model itself'} in the {draw.phase} pass, draw "
        f"{index + 1}"
        if draw
        else f"{index} draws"
        for draw in firsts
    ]
    where, cause = firsts[0] or firsts[1], ""
    if told[0] == told[1]:
        cause = NOT_RESTORED if where and where.phase == RECOMPUTE else SEEDED
        told = [f"{told[0]}, and {one} state of the generator" for one in ("one", "another")]
    about = f"random numbers of {where.owner or 'the model itself'}" if where else "random numbers"
    yield differ(D.OTHER_RANDOM_NUMBERS, about, told, (LAYERS, LOSS), cause)


def switches_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Global switches inside the forward pass and after the step. Accelerate's autocast is its own."""
    one, two, others = ledgers.reference, ledgers.fp8, explained.other_modules
    for mine, its, when in (
        (one.switches, two.switches, "inside the forward pass"),
        (one.switches_after, two.switches_after, "after the step"),
    ):
        for name, ours, theirs in _differing(mine, its, "not read"):
            own = name.startswith("autocast") and (explained.autocast or others)
            if not (own or ("sdp_enabled" in name and others)):
                yield differ(D.OTHER_SWITCH, name, (f"{name} = {ours} {when}", f"{name} = {theirs}"))


def optimizer_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Class, settings by parameter, schedule. Groups may be split otherwise as long as each parameter's settings are
    the same."""
    one, two = ledgers.reference.optimizer, ledgers.fp8.optimizer
    found: list[tuple[str, str, str]] = []
    if one.kind != two.kind:
        found = [("its class", one.kind, two.kind)]
    else:
        for name in sorted(one.members.keys() & two.members.keys()):
            ours, theirs = (arm.groups[arm.members[name]] for arm in (one, two))
            if other := next(_differing(ours, theirs, "not set"), None):
                key, mine, its = other
                found = [(f"{key} of {name}", f"{key} = {mine}", f"{key} = {its}")]
                break
        schedules = _differing(one.schedule, two.schedule, "none")
        found += [(f"the schedule's {key}", mine, its) for key, mine, its in schedules]
    for about, *values in found:
        yield differ(D.OTHER_OPTIMIZER, about, values, (LAYERS, LOSS))


def _differing(one: Mapping[str, str], two: Mapping[str, str], none: str) -> Iterator[tuple[str, str, str]]:
    """Key and both values where these differ. ``none``: the word for no value."""
    for key in dict.fromkeys([*one, *two]):
        if one.get(key) != two.get(key):
            yield key, one.get(key, none), two.get(key, none)


def updates_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The weights after some steps in which both arms' optimizers got the same gradients."""
    one, two = ledgers.reference.updates, ledgers.fp8.updates
    alike = one.steps == two.steps > 0 and one.size == two.size and one.digests.keys() == two.digests.keys()
    finite = math.isfinite(ledgers.reference.loss) and math.isfinite(ledgers.fp8.loss)
    if explained.other_modules or not alike or not finite or not _same_kinds(ledgers):
        return
    other = {
        name: _squares(one.sketches[name], two.sketches[name])
        for name, digest in one.digests.items()
        if digest and two.digests[name] and digest != two.digests[name]
    }
    if not other:
        return
    every = sum(_squares(sketch, sketch)[1] for sketch in one.sketches.values())
    apart = math.sqrt(sum(apart for apart, _ in other.values()) / every) if every else math.inf
    if not apart > OTHER:
        return
    worst = max(other, key=lambda name: other[name][0] / max(other[name][1], 1e-30))
    expected = f"the updates that BF16's optimizer makes of the same seeded gradients in {one.steps} steps"
    seen = f"other updates of {len(other)} of {len(one.digests)} weights, {apart:.1%} off: {some([worst, *other])}"
    yield differ(D.OTHER_UPDATES, f"updates of {worst}", (expected, seen), (LAYERS, LOSS))


def _same_kinds(ledgers: TwoLedgers) -> bool:
    """Whether the weights have the same dtypes and are those that the other arm trains: other rows name these."""
    one, two = ledgers.reference, ledgers.fp8
    kinds = [{name: arm.after[name].dtype for name in arm.updates.digests if name in arm.after} for arm in (one, two)]
    return kinds[0] == kinds[1] and one.gradients == two.gradients


def _squares(one: str, two: str) -> tuple[float, float]:
    """|one - two|^2 and |one|^2."""
    import numpy as np

    ours, theirs = (np.array(of_text(text), dtype=np.float64) for text in (one, two))
    return float(((ours - theirs) ** 2).sum()), float((ours**2).sum())
