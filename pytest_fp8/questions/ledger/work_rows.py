"""Rows of the ledger about the work inside a step: modules called, recomputed, products, operators, waits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_fp8.codes import D
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import EVALUATION, FP8
from pytest_fp8.questions.ledger.differences import (
    FAIL,
    INVALID,
    LAYERS,
    LOSS,
    SPEED,
    Difference,
    Explained,
    other_precision,
    other_work,
    outermost,
    size,
)
from pytest_fp8.questions.ledger.evidence import ArmLedger, ModuleCalls, TwoLedgers
from pytest_fp8.recipes import RECOMPUTE


def calls_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Number and input shape of each module's calls in training. An arm may evaluate with other layers than it trains
    with."""
    if not explained.work:
        return
    ranks = zip(ledgers.reference.of_ranks(), ledgers.fp8.of_ranks(), strict=False)
    for rank, (one, two) in enumerate(map(_calls, calls) for calls in ranks):
        other = [n for n in dict.fromkeys([*one, *two]) if one.get(n, {}) != two.get(n, {}) and not _open(n, explained)]
        where = f" on rank {rank}" if rank else ""
        for name in outermost(other):
            what = f"calls of {name or 'the model'}{where}"
            yield other_work(what, _told(one.get(name, {})), _told(two.get(name, {})))


def evaluated_otherwise(ledgers: TwoLedgers) -> list[str]:
    """Modules that one arm alone calls while it evaluates."""
    arms = (ledgers.reference, ledgers.fp8)
    one, two = ({c.module for c in arm.calls if c.phase == EVALUATION} for arm in arms)
    return outermost(one ^ two) if one and two else []


def _open(name: str, explained: Explained) -> bool:
    """Whether the arms may differ in the calls of a module."""
    return name in explained.routed or explained.inside(name) or explained.caller(name) != name


def _calls(rank: Sequence[ModuleCalls]) -> dict[str, Counter[str]]:
    calls: dict[str, Counter[str]] = {}
    for call in rank:
        if call.phase == "forward":
            calls.setdefault(call.module, Counter())[f"forward of {size(call.shape)}"] += call.count
    return calls


def _told(calls: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in sorted(calls.items())[:4]) or "never called"


def recomputed_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Which parts of the model are computed again in the backward pass. Where a recomputation ends follows from what
    the layers save, so that the last modules of a part may be missing."""
    if explained.other_modules:
        return
    one, two = ({c.module for c in arm.calls if _roots(c)} for arm in (ledgers.reference, ledgers.fp8))
    for ours, theirs in ((one, two), (two, one)):
        other = [name for name in outermost(ours - theirs) if not _goes_on_in(name, theirs, explained)]
        if other:
            states = ("recomputed", "not recomputed")
            reference, fp8 = states if ours is one else states[::-1]
            yield other_work(
                f"recomputation of {some([name or 'the model' for name in other])}",
                reference,
                fp8,
                "activation checkpointing in one arm alone",
                D.OTHER_RECOMPUTATION,
            )


def recomputed_the_same(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """That recomputation computes again what the first forward pass did, in each arm by itself."""
    one, two = (list(arm.recomputed_otherwise) for arm in (ledgers.reference, ledgers.fp8))
    if not explained.work or bool(one) == bool(two):
        return
    layers = [name or "the model" for name in two or one]
    same, other = "the values of the first forward pass again", f"other values at {some(layers)}"
    invalid = ((INVALID, (LAYERS, LOSS)),)
    for verdict, questions in ((FAIL, (LAYERS,)), (INVALID, (LOSS,))) if two else invalid:
        yield Difference(
            D.RECOMPUTED_OTHERWISE,
            verdict,
            "recomputation computes something else than the first forward in one arm alone",
            about=f"recomputation of {layers[0]}",
            expected=f"recomputation has {other if one else same}",
            seen=f"recomputation has {other if two else same}",
            cause="recomputation computes something else than the first forward (random state not preserved?): the "
            f"gradients are those of another dropout mask or noise; seen at {layers[0]}",
            next_step="checkpoint(..., preserve_rng_state=True), and nothing in the recomputed part that changes from "
            "call to call",
            questions=questions,
        )


def _goes_on_in(name: str, others: Collection[str], explained: Explained) -> bool:
    """Whether the other arm recomputes the same part of the model, as far as it needs to."""
    parent = name.rpartition(".")[0]
    if name in explained.routed or not parent:
        return name in explained.routed or bool(others)
    return any(other == parent or other.startswith((f"{parent}.", f"{name}.")) for other in others)


def _roots(call: ModuleCalls) -> bool:
    return call.phase == RECOMPUTE and call.outermost


def products_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Matrix products of modules that are no FP8 layers: number, sizes and precision. FP8 may take a product's place,
    and may compute gradients that nobody needs."""
    if not explained.work:
        return
    one, two = (_products(arm, explained) for arm in (ledgers.reference, ledgers.fp8))
    for owner in dict.fromkeys([*one, *two]):
        ours, theirs = one.get(owner, Counter()), two.get(owner, Counter())
        lost, added = ours - theirs, theirs - ours
        for kind in [kind for kind in added if kind.precision == FP8]:
            replaced = next((each for each in lost if each.sizes == kind.sizes), kind)
            lost, added = lost - Counter({replaced: added[kind]}), added - Counter({kind: added[kind]})
        where = f"matrix products of {owner or 'the model itself'}"
        if {kind.sizes for kind in lost} == {kind.sizes for kind in added} and lost.total() == added.total() > 0:
            if not explained.autocast:
                yield other_precision(where, _told(lost), _told(added))
        elif lost or added:
            yield other_work(where, _told(lost or ours), _told(added or theirs))


class ProductKind(NamedTuple):
    """A product as both arms must run it."""

    sizes: str
    """With the phase: ``forward 48x64x512``."""
    precision: str

    def __str__(self) -> str:
        return f"{self.sizes} in {self.precision}"


def _products(arm: ArmLedger, explained: Explained) -> dict[str, Counter[ProductKind]]:
    result: dict[str, Counter[ProductKind]] = {}
    for owned in arm.products:
        product, owner = owned.product, explained.caller(owned.owner)
        if owned.owner in explained.routed or explained.owner(owner):
            continue
        if product.phase not in (RECOMPUTE, EVALUATION):
            small, large = sorted(product.outer)
            kind = ProductKind(f"{product.phase} {small}x{product.inner}x{large}", product.kind)
            result.setdefault(owner, Counter())[kind] += product.batch
    return result


def operators_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """All other operators of the forward pass, by module and by number; with their dtype, but for autocast's sake.

    A Linear's own are left out: how it adds its bias depends on the layout of its input.
    """
    if not explained.work:
        return
    left = {*ledgers.reference.linears, *ledgers.fp8.linears, *explained.routed}
    one, two = (_operators(arm, explained, left) for arm in (ledgers.reference, ledgers.fp8))
    for owner in dict.fromkeys([*one, *two]):
        ours, theirs = one.get(owner, Counter()), two.get(owner, Counter())
        lost, added = ours - theirs, theirs - ours
        where = f"operators of {owner or 'the model itself'}"
        if not lost and not added:
            continue
        if _by_words(lost, 2) == _by_words(added, 2):
            if not (_with_numbers(lost) and _with_numbers(added)):
                # What could not be read in one arm is no difference.
                continue
            cause = "settings differ: the rate of a dropout, the epsilon of a norm, how a loss is reduced or weighted"
            yield other_work(where, _told(lost), _told(added), cause, D.OTHER_OPERATOR_SETTING)
        elif _by_words(lost, 1) == _by_words(added, 1):
            yield other_precision(where, _told(lost), _told(added))
        else:
            yield other_work(where, _told(lost) if lost else "none of them", _told(added) if added else "none of them")


def _with_numbers(operators: Counter[str]) -> bool:
    return any(len(kind.split()) > 2 for kind in operators)


def _by_words(operators: Counter[str], number: int) -> Counter[str]:
    """``operator dtype numbers`` by its first words."""
    result: Counter[str] = Counter()
    for kind, count in operators.items():
        result[" ".join(kind.split()[:number])] += count
    return result


def _operators(arm: ArmLedger, explained: Explained, left: set[str]) -> dict[str, Counter[str]]:
    result: dict[str, Counter[str]] = {}
    for owner, counts in arm.operators.items():
        if owner in left or owner in explained.functions or explained.owner(owner):
            continue
        mine = result.setdefault(owner, Counter())
        for kind, count in counts.items():
            mine[kind.split()[0] if explained.autocast else kind] += count
    return result


def waits_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """How often the host waits, as ``.item()`` has it wait for a value. An FP8 layer's own waits are its library's."""
    if not explained.work:
        return
    one, two = (_waits(arm, explained) for arm in (ledgers.reference, ledgers.fp8))
    for key in dict.fromkeys([*one, *two]):
        ours, theirs = one.get(key, 0), two.get(key, 0)
        if ours == theirs or (explained.autocast and theirs > ours):
            continue
        owner, phase = key
        arm = "the reference" if ours > theirs else "the FP8 arm"
        yield Difference(
            D.OTHER_WAITS,
            INVALID,
            f"{arm} waits for the GPU where the other arm does not",
            about=f"waits in the {phase} part",
            expected=f"{ours} waits in the {phase} part, {owner or 'the model itself'}",
            seen=f"{theirs} waits in the {phase} part, {owner or 'the model itself'}",
            cause="a value read by .item(), float() or if in each step, a copy to the CPU, a synchronisation, a sleep: "
            "the arm that waits is slower by that, and not by its precision",
            next_step="log values in neither arm, or keep them on the GPU and read them every hundred steps in both",
            questions=(LAYERS, SPEED),
        )


def _waits(arm: ArmLedger, explained: Explained) -> dict[tuple[str, str], int]:
    """Owner and phase -> waits."""
    compared = [owner for owner in arm.waits if owner not in explained.routed and not explained.owner(owner)]
    return {
        (owner, phase): count for owner in compared for phase, count in arm.waits[owner].items() if phase != RECOMPUTE
    }
