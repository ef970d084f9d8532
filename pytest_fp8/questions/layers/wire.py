"""Does what travels between ranks travel in the precision that the configuration promises? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pytest_fp8.case import Case
from pytest_fp8.codes import L
from pytest_fp8.questions.findings import fail
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import ArmLedger, Collective, TwoLedgers
from pytest_fp8.verdicts import Finding

PADDING = 0.02
"""Share of bytes more than the weights take. FSDP2 pads each shard: 0.3 % with the micro model's weights, the smallest
of the suite (two ranks, gloo)."""


def find_on_wire(case: Case, evidence: LayersEvidence, ledgers: TwoLedgers) -> Finding | None:
    """FP8 all-gather that gathers BF16. Held against the reference, whose step gathers the same weights."""
    if not case.options.get("float8_all_gather"):
        return None
    sizes = [prod(evidence.originals[name]) for name in evidence.sharded if name in evidence.converted]
    before, now = (_gathered(arm) for arm in (ledgers.reference, ledgers.fp8))
    if not before or not sizes:
        return fail(
            L.NOTHING_GATHERED,
            "FP8 all-gather was asked for, and nothing is gathered",
            expected="converted weights that FSDP2 shards, and gathers for each forward pass",
            seen=f"{len(sizes)} sharded; {travelled(ledgers.fp8) or 'nothing'} travels in FP8's step",
            cause="the workload's parallelize() shards no converted weight",
            next_step="fully_shard() in parallelize(); or leave float8_all_gather out of the mark",
        )
    promised = before - sum(sizes)
    if now <= promised * (1 + PADDING):
        return None
    return fail(
        L.GATHERS_BF16,
        "FP8 all-gather was asked for, and BF16 is gathered",
        expected=f"{_words(promised)} gathered before the backward pass: BF16's {_words(before)}, with one byte in "
        f"place of two for each element of the {len(sizes)} converted weights that are sharded",
        seen=f"{_words(now)}: {travelled(ledgers.fp8)}",
        cause="FSDP2 does not see the converted weights as torchao's: they were replaced after the conversion",
        next_step="shard the converted model itself; each weight's local tensor must be a "
        "WeightWithDynamicFloat8CastTensor",
    )


def travelled(ledger: ArmLedger) -> str:
    """One rank's collectives of a step, in words; empty where there are none."""
    kinds: dict[str, list[Collective]] = {}
    for one in ledger.wire:
        kinds.setdefault(f"{one.operation} ({one.dtype})", []).append(one)
    return ", ".join(f"{sum(c.count for c in each)} {kind} of {_words(_bytes(each))}" for kind, each in kinds.items())


def same_on_all_ranks(ledger: ArmLedger) -> bool:
    """Whether each of several ranks was given the same batch. ``batch`` lists the ranks' parts one after another."""
    part = len(ledger.batch) // ledger.ranks
    known = all(note.digest for note in ledger.batch)
    return ledger.ranks > 1 and part > 0 and known and list(ledger.batch) == [*ledger.batch[:part]] * ledger.ranks


def _gathered(ledger: ArmLedger) -> int:
    """Before a backward pass. An evaluation ahead of the forward pass leaves the root gathered for it."""
    phases = ("forward", "evaluation")
    return _bytes([one for one in ledger.wire if one.operation == "all-gather" and one.phase in phases])


def _bytes(collectives: Sequence[Collective]) -> int:
    return sum(one.bytes * one.count for one in collectives)


def _words(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
