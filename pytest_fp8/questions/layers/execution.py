"""Did each FP8 layer's products run in FP8, and none that the recipe keeps in high precision; and does what travels
between ranks travel as promised? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from pytest_fp8.case import Case
from pytest_fp8.codes import L
from pytest_fp8.questions.findings import SHOWN, finding, some
from pytest_fp8.questions.layers.conversion import eval_cause
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import ABSENT, FP8, Attribution, StepProducts
from pytest_fp8.questions.ledger.evidence import ArmLedger, Collective, TwoLedgers
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.verdicts import Finding, Verdict

PADDING = 0.02
"""Share of bytes more than the weights take. FSDP2 pads each shard: 0.3 % with the micro model's weights, the smallest
of the suite (two ranks, gloo)."""
NOT_IN_FP8 = {
    FPROP: L.FPROP_NOT_IN_FP8,
    DGRAD: L.DGRAD_NOT_IN_FP8,
    WGRAD: L.WGRAD_NOT_IN_FP8,
    RECOMPUTE: L.RECOMPUTE_NOT_IN_FP8,
}


def find_in_execution(
    case: Case, evidence: LayersEvidence, step: StepProducts, roles: Sequence[Role]
) -> Finding | None:
    """The first thing that is wrong with what one training step executed in these roles, or ``None``."""
    owed = [a for a in step.attributions if a.layer in evidence.in_fp8 and not a.call.past]
    if not owed and all(product.kind != FP8 for product in step.foreign):
        any_called = evidence.calls or step.foreign or step.others
        seen = "no FP8 layer was called" if any_called else "no Linear was called, and no matrix product ran"
        return finding(L.NEVER_CALLED, "the model's forward pass to go through its FP8 layers", seen)
    for role in roles:
        mine = [a for a in owed if a.role == role]
        wanted = [a for a in mine if evidence.owes_fp8(case, a.layer, role)]
        if wrong := [a for a in wanted if a.kind != FP8 and not _may_be_absent(a, evidence)]:
            return _not_in_fp8(evidence, role, mine, wrong)
        if wrong := [a for a in mine if a.kind == FP8 and not evidence.owes_fp8(case, a.layer, role)]:
            recipe = evidence.recipe_of(case, wrong[0].layer)
            seen = f"{len(wrong)} of {len(mine)}: {_kinds(wrong)}"
            return finding(L.AGAINST_RECIPE, f"no {role} product in FP8", seen, role=role, recipe=recipe)
    return None


def _may_be_absent(product: Attribution, evidence: LayersEvidence) -> bool:
    """A recomputation ends as soon as it has what the backward pass needs: its last product may be absent. So may all
    of an expert that no row is sent to."""
    return product.kind == ABSENT and (product.role == RECOMPUTE or product.layer in evidence.routed)


def find_past_layers(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first role in which code multiplies with FP8 layers' weights in high precision and never calls the layers."""
    past = [(role, call) for call in evidence.calls if call.past for role in call.owed]
    for role in (FPROP, RECOMPUTE, DGRAD):
        found = {c.name: c for each, c in past if each == role and evidence.owes_fp8(case, c.name, role)}
        if found:
            seen = some([f"{name}, {call.ran[role].kind} by {call.by}" for name, call in found.items()])
            return finding(
                NOT_IN_FP8[role],
                "the layers' own products in FP8",
                f"their weights multiplied in high precision: {seen}",
                about=next(iter(found)),
                what=f"{role} of {len(found)} of {len(evidence.in_fp8)} layers",
                cause="the model keeps references to the unconverted modules, or multiplies with the layers' weights "
                "itself",
            )
    return None


def _not_in_fp8(
    evidence: LayersEvidence, role: str, mine: Sequence[Attribution], wrong: Sequence[Attribution]
) -> Finding:
    """Of the products ``mine`` in one role, those in ``wrong`` did not run in FP8."""
    if all(a.kind == "unknown kernel" for a in wrong):
        unknown = sorted({p.kernel for p in evidence.verified() if p.kind == "unknown kernel"})[:SHOWN]
        known = f"a family seen in known FP8 products: {', '.join((evidence.families or {}).get(FP8, []))}"
        return finding(L.UNKNOWN_KERNEL, known, ", ".join(unknown), Verdict.INCONCLUSIVE, what=role)
    of_function = role in (DGRAD, WGRAD) and wrong[0].call.by
    each = "calls" if len({a.layer for a in mine}) < len(mine) else "layers"
    return finding(
        L.GRADIENTS_NOT_IN_FP8 if of_function else NOT_IN_FP8[role],
        f"{len(mine)} {role} products in FP8",
        f"{len(mine) - len(wrong)} in FP8; {_kinds(wrong)}",
        about=wrong[0].layer,
        what=f"{role} of {len(wrong)} of {len(mine)} {each}",
        cause=eval_cause(evidence),
    )


def _kinds(wrong: Sequence[Attribution]) -> str:
    """``bfloat16: layers.3.up; bfloat16: 1 of 32 of equal sizes, and which is not known: ...``."""
    known: dict[str, list[str]] = {}
    unknown: Counter[tuple[str, tuple[tuple[str, Role], ...]]] = Counter()
    for each in wrong:
        if each.among:
            unknown[each.kind, tuple(each.among)] += 1
        else:
            by = each.call.by if not each.layer.startswith(f"{each.call.by} (") else ""
            known.setdefault(each.kind, []).append(f"{each.layer} by {by}" if by else each.layer)
    said = [f"{kind}: {some(layers)}" for kind, layers in known.items()]
    for (kind, among), number in unknown.items():
        roles = {role for _, role in among}
        names = [layer if len(roles) == 1 else f"{role} of {layer}" for layer, role in among]
        said.append(f"{kind}: {number} of {len(among)} of equal sizes, and which is not known: {some(names)}")
    return "; ".join(said)


# -- between ranks ----------------------------------------------------------------------------------------------------


def find_on_wire(case: Case, evidence: LayersEvidence, ledgers: TwoLedgers) -> Finding | None:
    """FP8 all-gather that gathers BF16. Held against the reference, whose step gathers the same weights."""
    if not case.options.get("float8_all_gather"):
        return None
    sizes = [prod(evidence.originals[name]) for name in evidence.sharded if name in evidence.converted]
    before, now = (_gathered(arm) for arm in (ledgers.reference, ledgers.fp8))
    promised = before - sum(sizes)
    if before and sizes and now <= promised * (1 + PADDING):
        return None
    expected = f"{_bytes(max(promised, 0))} gathered before the backward pass: BF16's {_bytes(before)}, with one byte"
    return finding(
        L.GATHERS_BF16,
        f"{expected} in place of two for each element of the {len(sizes)} converted weights that are sharded",
        f"{_bytes(now)}: {travelled(ledgers.fp8) or 'nothing travels'}",
    )


def _gathered(ledger: ArmLedger) -> int:
    """Bytes before a backward pass. An evaluation ahead of the forward pass leaves the root gathered for it."""
    phases = ("forward", "evaluation")
    return sum(c.bytes * c.count for c in ledger.wire if c.operation == "all-gather" and c.phase in phases)


def travelled(ledger: ArmLedger) -> str:
    """One rank's collectives of a step, in words; empty where there are none."""
    kinds: dict[str, list[Collective]] = {}
    for one in ledger.wire:
        kinds.setdefault(f"{one.operation} ({one.dtype})", []).append(one)
    return ", ".join(
        f"{sum(c.count for c in each)} {kind} of {_bytes(sum(c.bytes * c.count for c in each))}"
        for kind, each in kinds.items()
    )


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
