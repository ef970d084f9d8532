"""Rows of the ledger about settings: torch's global switches, the optimizer and its schedule. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_fp8.codes import D
from pytest_fp8.questions.ledger.differences import EVERY, INVALID, LAYERS, LOSS, Difference, Explained
from pytest_fp8.questions.ledger.evidence import TwoLedgers

ATTENTION = "sdp_enabled"


def switches_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Global switches inside the forward pass and after the step. Accelerate's autocast is its own."""
    pairs = (
        (ledgers.reference.switches, ledgers.fp8.switches, "inside the forward pass"),
        (ledgers.reference.switches_after, ledgers.fp8.switches_after, "after the step"),
    )
    for one, two, when in pairs:
        for name in _differing(one, two):
            if name.startswith("autocast") and (explained.autocast or explained.other_modules):
                continue
            if ATTENTION in name and explained.other_modules:
                continue
            yield Difference(
                D.OTHER_SWITCH,
                INVALID,
                f"another precision or setting outside FP8: {name}",
                about=name,
                expected=f"{name} = {one.get(name, 'not read')} {when}",
                seen=f"{name} = {two.get(name, 'not read')}",
                cause="convert(), precision(), build() or a library set it in one arm's process alone, so that this "
                "switch is measured besides FP8",
                next_step="set it in build(), which runs in both arms",
                questions=EVERY,
            )


def optimizer_alike(ledgers: TwoLedgers, explained: Explained) -> Iterator[Difference]:
    """Class, settings by parameter, schedule. Groups may be split otherwise as long as each parameter's settings are
    the same."""
    one, two = ledgers.reference.optimizer, ledgers.fp8.optimizer
    if one.kind != two.kind:
        yield _other("its class", one.kind, two.kind)
        return
    for name in sorted(one.members.keys() & two.members.keys()):
        ours, theirs = dict(one.groups[one.members[name]]), dict(two.groups[two.members[name]])
        other = _differing(ours, theirs)
        if other:
            key = other[0]
            yield _other(
                f"{key} of {name}", f"{key} = {ours.get(key, 'not set')}", f"{key} = {theirs.get(key, 'not set')}"
            )
            break
    for key in _differing(one.schedule, two.schedule):
        yield _other(f"the schedule's {key}", one.schedule.get(key, "none"), two.schedule.get(key, "none"))


def _differing(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    return [key for key in dict.fromkeys([*one, *two]) if one.get(key) != two.get(key)]


def _other(what: str, reference: str, fp8: str) -> Difference:
    return Difference(
        D.OTHER_OPTIMIZER,
        INVALID,
        f"the arms' optimizers differ: {what}",
        about=what,
        expected=reference,
        seen=fp8,
        cause="optimizer() looks at the model or its parameters' classes, a schedule is in another place, or convert() "
        "made or changed an optimizer",
        next_step="give both arms the same optimizer, with the same settings for each parameter",
        questions=(LAYERS, LOSS),
    )
