"""What a PASS of the layers question must not hide: where less is in FP8 than a reader expects. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_fp8.case import Case
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8, TRAINING, StepProducts
from pytest_fp8.questions.ledger.compare import evaluated_otherwise, never_called, outermost
from pytest_fp8.questions.ledger.evidence import ArmLedger, OwnedProduct, TwoLedgers
from pytest_fp8.recipes import Stays

WORTH_NAMING = 0.02
"""Share of the Linears' weights, or of the step's FLOPs, above which what stays in high precision is named. Less
costs less than 2 % of the speed, a case's default ``tolerance``."""


def beside(case: Case, evidence: LayersEvidence, step: StepProducts, ledgers: TwoLedgers | None) -> list[str]:
    """One text for each thing to name. Workloads of several models may share their ``leave`` patterns."""
    said = [*_of_own(case, evidence, step), *_of_model(evidence, step)]
    said += _of_ledgers(ledgers) if ledgers is not None else ()
    # Such as a mixture's experts in one parameter.
    if evidence.stacked_weights:
        said.append(f"not in FP8, since no Linear holds them: {some(evidence.stacked_weights)}")
    return said


def _of_own(case: Case, evidence: LayersEvidence, step: StepProducts) -> Iterator[str]:
    """What is in FP8 by code of the user's own, and by another recipe than the case's."""
    if others := evidence.other_recipes(case):
        named = some([f"{name} by {recipe}" for name, recipe in others.items()])
        yield f"by another recipe than {case.recipe}: {named}"
    if evidence.of_own:
        yield f"FP8 by code of your own, known by its products: {some(evidence.of_own)} (its recipe was not read)"
    functions = [call for call in evidence.calls if call.by and not call.past]
    if functions:
        where = some(list(dict.fromkeys(f"{call.name} by {call.by}" for call in functions)))
        yield f"in FP8 where no Linear is called: {where} (what else runs there was not compared)"
    if batched := [each for each in evidence.foreign if each.product.kind == FP8 and each.product.phase in TRAINING]:
        share = sum(owned.product.flops for owned in batched) / step.flops()
        yield f"{len(batched)} products in FP8 ({share:.1%} of the GEMM FLOPs) not judged by role: {callers(batched)}"


def callers(products: Sequence[OwnedProduct]) -> str:
    """``bmm of blocks.0.mix``: the operators that multiply, and the modules that call them."""
    by_flops: Counter[str] = Counter()
    for owned in products:
        by_flops[f"{owned.product.operator} of {owned.owner or 'the model itself'}"] += owned.product.flops
    return some([name for name, _ in by_flops.most_common()])


def _of_model(evidence: LayersEvidence, step: StepProducts) -> Iterator[str]:
    # Sizes alone: heads, adapters, what the workload leaves and what a library leaves by its own rule are as they
    # should be.
    weights = {name: inputs * outputs for name, (inputs, outputs) in evidence.originals.items()}
    odd = [name for name, reason in evidence.skipped.items() if reason.kind is Stays.SIZE]
    if sum(weights.get(name, 0) for name in odd) > WORTH_NAMING * sum(weights.values()):
        reasons = some(list(dict.fromkeys(evidence.skipped[name].text for name in odd)))
        stay = "Linear stays" if len(odd) == 1 else "Linears stay"
        yield f"{len(odd)} of {len(weights)} {stay} in BF16: {some(odd)} ({reasons})"
    # Raw parameters, convolutions, adapters of a class of one's own.
    share = sum(product.flops for product in step.foreign if product.kind != FP8) / step.flops()
    if share > WORTH_NAMING:
        outside = [owned for owned in evidence.foreign if owned.product.kind != FP8]
        yield f"{share:.1%} of these FLOPs are outside the Linears, in high precision: {callers(outside)}"
    if evidence.unmatched:
        yield matches_nothing(evidence.unmatched)


def matches_nothing(patterns: Sequence[str]) -> str:
    """What is said of patterns of ``leave``."""
    return f"leave={some([repr(pattern) for pattern in patterns])} matches no Linear"


def _of_ledgers(ledgers: TwoLedgers) -> Iterator[str]:
    if unused := never_called(ledgers):
        layer = "1 converted layer was" if len(unused) == 1 else f"{len(unused)} converted layers were"
        yield f"{layer} not called in the step that was watched, in either arm: {some(unused)}"
    # Where one arm alone does, it is a difference.
    if otherwise := ledgers.fp8.recomputed_otherwise:
        where = some([name or "the model" for name in otherwise])
        yield f"recomputation computes something else than the first forward in both arms: {where}"
    if other := evaluated_otherwise(ledgers):
        yield f"the arms evaluate with other modules, which were not compared: {some(other)}"
    if same_on_all_ranks(ledgers.fp8):
        yield "all ranks were given one and the same batch: cut it by rank in batch(step)"
    if ledgers.fp8.ranks > 1 and not (ledgers.fp8.wire or ledgers.reference.wire):
        yield (
            "nothing travelled between the ranks in the forward and backward passes that were watched: unless the "
            "optimizer reduces gradients, each rank trains alone"
        )
    # Where a batch has no image, or by a fault.
    routed, ranks = ledgers.routed(), [{call.module for call in calls} for calls in ledgers.fp8.of_ranks()]
    less = [outermost(set.union(*ranks) - called - routed) for called in ranks]
    if any(less):
        rank = next(rank for rank, names in enumerate(less) if names)
        yield f"rank {rank} does not call what other ranks call, in either arm: {some(less[rank])}"
    if routed:
        where = some([name or "the model itself" for name in sorted(routed)])
        yield f"not compared between the arms, since its work follows from what the model computes: {where}"


def same_on_all_ranks(ledger: ArmLedger) -> bool:
    """Whether each of several ranks was given the same batch. ``batch`` lists the ranks' parts one after another."""
    part = len(ledger.batch) // ledger.ranks
    known = all(note.digest for note in ledger.batch)
    return ledger.ranks > 1 and part > 0 and known and list(ledger.batch) == [*ledger.batch[:part]] * ledger.ranks
