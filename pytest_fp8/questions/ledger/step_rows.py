"""Rows of the ledger about a step as a whole: what enters, passes, modes, clipping, the loss, random numbers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_fp8.codes import D
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.questions.ledger.differences import (
    BRANCHES,
    EVERY,
    INVALID,
    LAYERS,
    LOSS,
    MEMORY,
    OUTSIDE,
    SAME,
    SPEED,
    Difference,
    Explained,
    other_precision,
    other_work,
    outermost,
    size,
)
from pytest_fp8.questions.ledger.evidence import ArmLedger, Entered, TensorNote, TwoLedgers
from pytest_fp8.questions.ledger.random_numbers import drawn_otherwise

CLIPS = 1.5
"""Gradients are clipped in one arm alone where the shares that clipping leaves of their norms differ by this factor.
Sound emulated FP8 moves gradients by 5 to 11 % a layer (micro and tiny, three recipes), so that clipping to one bound
leaves shares that differ by no more."""


OTHER_TENSORS = {
    D.OTHER_DATA: {
        "headline": "the arms trained on different data",
        "cause": "batches that do not depend on seed and step alone: another seed, a shuffle, a loader's generator, a "
        "loader that keeps its place from step to step",
        "next_step": "draw the batch inside batch(step) with torch's own generators, which are seeded for each step",
    },
    D.OTHER_INPUTS: {
        "headline": "the arms' models are given other inputs, made of the same batch",
        "cause": "batch() gives both arms the same tensors, and loss() or the step makes other inputs of them in one "
        "arm: padding on another side, a mask, a shuffle, data of its own",
        "next_step": "prepare the inputs in batch(step), or in the same way in both arms",
    },
}


def entered_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The batch, and what entered each outermost module call: number, mode, shapes, dtypes and content."""
    other_batch = list(_tensors("the batch", ledgers.reference.batch, ledgers.fp8.batch, explained))
    yield from other_batch
    if OUTSIDE in explained.routed:
        return
    one, two = (list(arm.entered) for arm in (ledgers.reference, ledgers.fp8))
    # Training does not depend on how the arms evaluate; their times do.
    for phase, word, questions in (("forward", "training", EVERY), (EVALUATION, "evaluating", (SPEED, MEMORY))):
        ours, theirs = ([call for call in calls if call.phase == phase] for calls in (one, two))
        if len(ours) != len(theirs) and not explained.other_modules:
            yield other_work(
                f"outermost module calls while {word}",
                f"{len(ours)}: {_names(ours)}",
                f"{len(theirs)}: {_names(theirs)}",
                questions=questions,
            )
            return
        for call, other in zip(ours, theirs, strict=False):
            where = f"what enters {call.module or 'the model'}"
            exact, code = phase == "forward", D.OTHER_DATA if other_batch else D.OTHER_INPUTS
            sized = call.module not in explained.routed
            for found in _tensors(where, call.tensors, other.tensors, explained, exact, sized, code):
                yield replace(found, questions=tuple(each for each in found.questions if each in questions))
            if call.gradients != other.gradients:
                yield other_work(
                    f"autograd in the call of {call.module or 'the model'}",
                    "on" if call.gradients else "off",
                    "on" if other.gradients else "off",
                    code=D.OTHER_MODE,
                    questions=questions,
                )


def _names(calls: Sequence[Entered]) -> str:
    counts = Counter(call.module or "the model" for call in calls)
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in list(counts.items())[:4])


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
        yield other_work(where, _listed(lost) or _listed(one), _listed(added) or _listed(two))
        return
    digests = [[note.digest for note in notes if note.digest] for notes in (ours, theirs)]
    alike = [note.digest != "" for note in ours] == [note.digest != "" for note in theirs]
    if exact and alike and Counter(digests[0]) != Counter(digests[1]):
        yield Difference(
            code,
            INVALID,
            **OTHER_TENSORS[code],
            about=where,
            expected=f"{where}: content {_first(digests[0], digests[1])}",
            seen=f"{where}: content {_first(digests[1], digests[0])}",
            questions=(LOSS,),
        )


def _first(ours: Sequence[str], theirs: Sequence[str]) -> str:
    return next((digest for digest in ours if digest not in theirs), "")


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} ({count} times)" if count > 1 else kind for kind, count in list(kinds.items())[:4])


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
            yield other_work(what, str(one), str(two), code=D.OTHER_PASSES)


def modes_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Train or eval of each module that trains."""
    one, two = (_modes(arm) for arm in (ledgers.reference, ledgers.fp8))
    other = [name for name in one if name in two and one[name] != two[name] and not explained.inside(name)]
    for name in outermost(other):
        mode, seen = sorted(one[name]), sorted(two[name])
        cause = (
            f"eval() in one arm alone ({len(other)} modules): dropout is off there, and running statistics stand still"
        )
        yield other_work(f"train or eval mode of {name or 'the model'}", _mode(mode), _mode(seen), cause, D.OTHER_MODE)


def _modes(arm: ArmLedger) -> dict[str, set[bool]]:
    modes: dict[str, set[bool]] = {}
    for call in arm.calls:
        if call.phase == "forward":
            modes.setdefault(call.module, set()).add(call.training)
    return modes


def _mode(training: Sequence[bool]) -> str:
    return " and ".join("train" if on else "eval" for on in training)


def clipped_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The share of the gradients' norm that clipping leaves."""
    one, two = ledgers.reference.norm_kept, ledgers.fp8.norm_kept
    if min(one, two) > 0 and max(one, two) / min(one, two) > CLIPS:
        yield Difference(
            D.OTHER_CLIPPING,
            INVALID,
            "gradients are clipped or scaled in one arm alone",
            about="the gradients' norm between the backward pass and the optimizer's step",
            expected=f"{one:.3g} times the norm at the end of the backward pass",
            seen=f"{two:.3g} times it",
            cause=BRANCHES,
            next_step=SAME,
            questions=(LAYERS, LOSS),
        )


def losses_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The loss's dtype."""
    if (
        ledgers.reference.loss_dtype != ledgers.fp8.loss_dtype
        and not explained.autocast
        and not explained.other_modules
    ):
        yield other_precision("the loss", ledgers.reference.loss_dtype, ledgers.fp8.loss_dtype)


def random_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """The generators' state after the step. A router that sends other rows through a dropout draws other numbers."""
    if not explained.work or explained.routed or ledgers.reference.random == ledgers.fp8.random:
        return
    yield drawn_otherwise(ledgers)
