"""Rows of the ledger about the work inside a step: modules called, recomputed, products, operators, waits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
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
    differ,
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
            told = (_told(calls.get(name, {})) for calls in (one, two))
            yield differ(D.OTHER_WORK, f"calls of {name or 'the model'}{where}", told)


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
    arms = (ledgers.reference, ledgers.fp8)
    one, two = ({c.module for c in arm.calls if c.phase == RECOMPUTE and c.outermost} for arm in arms)
    for ours, theirs in ((one, two), (two, one)):
        other = [name for name in outermost(ours - theirs) if not _goes_on_in(name, theirs, explained)]
        if other:
            states = ("recomputed", "not recomputed")[:: 1 if ours is one else -1]
            about = f"recomputation of {some([name or 'the model' for name in other])}"
            yield differ(D.OTHER_RECOMPUTATION, about, states, cause="activation checkpointing in one arm alone")


def recomputed_the_same(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """That recomputation computes again what the first forward pass did, in each arm by itself."""
    one, two = (list(arm.recomputed_otherwise) for arm in (ledgers.reference, ledgers.fp8))
    if not explained.work or bool(one) == bool(two):
        return
    layers = [name or "the model" for name in two or one]
    same, other = "the values of the first forward pass again", f"other values at {some(layers)}"
    said = [f"recomputation has {other if arm else same}" for arm in (one, two)]
    for verdict, questions in ((FAIL, (LAYERS,)), (INVALID, (LOSS,))) if two else ((INVALID, (LAYERS, LOSS)),):
        about, layer = f"recomputation of {layers[0]}", layers[0]
        yield replace(differ(D.RECOMPUTED_OTHERWISE, about, said, questions, layer=layer), verdict=verdict)


def _goes_on_in(name: str, others: Collection[str], explained: Explained) -> bool:
    """Whether the other arm recomputes the same part of the model, as far as it needs to."""
    parent = name.rpartition(".")[0]
    if name in explained.routed or not parent:
        return name in explained.routed or bool(others)
    return any(other == parent or other.startswith((f"{parent}.", f"{name}.")) for other in others)


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
                yield differ(D.OTHER_PRECISION, where, (_told(lost), _told(added)))
        elif lost or added:
            yield differ(D.OTHER_WORK, where, (_told(lost or ours), _told(added or theirs)))


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
            # What could not be read in one arm is no difference.
            if all(any(len(kind.split()) > 2 for kind in each) for each in (lost, added)):
                settings = "the rate of a dropout, the epsilon of a norm, how a loss is reduced or weighted"
                cause = f"settings differ: {settings}"
                yield differ(D.OTHER_OPERATOR_SETTING, where, (_told(lost), _told(added)), cause=cause)
            continue
        code = D.OTHER_PRECISION if _by_words(lost, 1) == _by_words(added, 1) else D.OTHER_WORK
        yield differ(code, where, (_told(each) if each else "none of them" for each in (lost, added)))


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
        counts = (f"{count} waits in the {phase} part, {owner or 'the model itself'}" for count in (ours, theirs))
        yield differ(D.OTHER_WAITS, f"waits in the {phase} part", counts, (LAYERS, SPEED), arm=arm)


def _waits(arm: ArmLedger, explained: Explained) -> dict[tuple[str, str], int]:
    """Owner and phase -> waits."""
    compared = [owner for owner in arm.waits if owner not in explained.routed and not explained.owner(owner)]
    return {
        (owner, phase): count for owner in compared for phase, count in arm.waits[owner].items() if phase != RECOMPUTE
    }
