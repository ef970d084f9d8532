"""Did each FP8 layer's products run in FP8, and none that the recipe keeps in high precision? Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.case import Case
from pytest_fp8.codes import Code, L
from pytest_fp8.questions.findings import SHOWN, fail, some
from pytest_fp8.questions.layers.conversion import eval_cause
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import ABSENT, FP8, Attribution, StepProducts
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role
from pytest_fp8.verdicts import Finding, Verdict


@dataclass(frozen=True)
class Why:
    """Why products did not run in FP8, and what to do."""

    code: Code
    cause: str
    next_step: str


def _read(part: str) -> str:
    return f"read the layer's {part}, and the recipe's roles"


CAUSES = {
    FPROP: Why(
        L.FPROP_NOT_IN_FP8,
        "FP8 is off in the forward pass, or the library fell back to high precision",
        _read("forward"),
    ),
    DGRAD: Why(
        L.DGRAD_NOT_IN_FP8,
        "forward in FP8, backward in high precision: the layer was made for inference or for frozen weights",
        _read("backward"),
    ),
    WGRAD: Why(
        L.WGRAD_NOT_IN_FP8,
        "the weight gradient was kept in high precision by the recipe or the layer",
        _read("backward"),
    ),
    RECOMPUTE: Why(
        L.RECOMPUTE_NOT_IN_FP8,
        "recomputation under activation checkpointing runs outside the precision context",
        _read("backward"),
    ),
}
"""Of a layer that is called, by role."""
OWN_GRADIENT = Why(
    L.GRADIENTS_NOT_IN_FP8,
    "forward in FP8, backward in high precision: the function's backward multiplies what it saved in high precision, "
    "or autograd derives it from a cast",
    "multiply in FP8 in the function's backward, too; or ask for a recipe that keeps these gradients in high "
    "precision, such as rowwise_with_gw_hp",
)
"""Of a function of the user's own whose forward product is in FP8."""
PAST = {
    "cause": "the model keeps references to the unconverted modules, or multiplies with the layers' weights itself",
    "next_step": "convert before anything takes references to layers, such as wrappers; call the layers themselves; or "
    "leave them in high precision, Workload(leave=(name, ...))",
}
OTHERS_CALLED = {"seen": "no FP8 layer was called", **PAST}
SOMETIMES = (
    "these layers run in FP8 in some of their calls and not in others: a precision context that is not around each "
    "forward pass, as around the first micro-batch alone"
)
NOTHING_CALLED = {
    "seen": "no Linear was called, and no matrix product ran",
    "cause": "the loss, or a step of one's own, does not call the model that it is given",
    "next_step": "call it: loss(model, batch) with model(batch) in it; print in its forward to see who calls it",
}


def find_in_execution(
    case: Case, evidence: LayersEvidence, step: StepProducts, roles: Sequence[Role]
) -> Finding | None:
    """The first thing that is wrong with what one training step executed in these roles, or ``None``."""
    owed = [a for a in step.attributions if a.layer in evidence.in_fp8 and not a.call.past]
    if not owed and all(product.kind != FP8 for product in step.foreign):
        return fail(
            L.NEVER_CALLED,
            "converted layers were never called in the training step",
            expected="the model's forward pass to go through its FP8 layers",
            **(OTHERS_CALLED if evidence.calls or step.foreign or step.others else NOTHING_CALLED),
        )
    for role in roles:
        mine = [a for a in owed if a.role == role]
        wanted = [a for a in mine if evidence.owes_fp8(case, a.layer, role)]
        if wrong := [a for a in wanted if a.kind != FP8 and not _may_be_absent(a, evidence)]:
            return _not_in_fp8(evidence, role, mine, wrong)
        if wrong := [a for a in mine if a.kind == FP8 and not evidence.owes_fp8(case, a.layer, role)]:
            return fail(
                L.AGAINST_RECIPE,
                f"{role} ran in FP8 although recipe {evidence.recipe_of(case, wrong[0].layer)!r} keeps it in high "
                "precision",
                expected=f"no {role} product in FP8",
                seen=f"{len(wrong)} of {len(mine)}: {_kinds(wrong)}",
                cause="another recipe's behaviour",
                next_step="check the recipe's configuration",
            )
    return None


def _may_be_absent(product: Attribution, evidence: LayersEvidence) -> bool:
    """A recomputation ends as soon as it has what the backward pass needs: its last product may be absent. So may all
    of an expert that no row is sent to."""
    return product.kind == ABSENT and (product.role == RECOMPUTE or product.layer in evidence.routed)


def find_past_layers(case: Case, evidence: LayersEvidence) -> Finding | None:
    """The first role in which code multiplies with FP8 layers' weights in high precision and never calls the layers."""
    past = [(role, call) for call in evidence.calls if call.past for role in call.owed]
    for role in (FPROP, RECOMPUTE, DGRAD):
        found = {c.name: c for each, c in reversed(past) if each == role and evidence.owes_fp8(case, c.name, role)}
        if not found:
            continue
        seen = [f"{name}, {found[name].ran[role].kind} by {found[name].by}" for name in reversed(found)]
        return fail(
            CAUSES[role].code,
            f"converted but not executed in FP8: {role} of {len(found)} of {len(evidence.in_fp8)} layers",
            expected="the layers' own products in FP8",
            seen=f"their weights multiplied in high precision: {some(seen)}",
            about=next(reversed(found)),
            **PAST,
        )
    return None


def _not_in_fp8(
    evidence: LayersEvidence, role: str, mine: Sequence[Attribution], wrong: Sequence[Attribution]
) -> Finding:
    """Of the products ``mine`` in one role, those in ``wrong`` did not run in FP8."""
    if all(a.kind == "unknown kernel" for a in wrong):
        unknown = {p.kernel for p in evidence.verified() if p.kind == "unknown kernel"}
        return Finding(
            L.UNKNOWN_KERNEL,
            Verdict.INCONCLUSIVE,
            headline=f"{role} ran on kernels that are of no learned family",
            expected=f"a family seen in known FP8 products: {', '.join((evidence.families or {}).get(FP8, []))}",
            seen=", ".join(sorted(unknown)[:SHOWN]),
            cause="a library that multiplies FP8 with kernels of its own",
            next_step="profile the layer alone and report the kernel's name",
        )
    why = OWN_GRADIENT if role in (DGRAD, WGRAD) and wrong[0].call.by else CAUSES[role]
    often = len({a.layer for a in mine}) < len(mine)
    sometimes = (
        often
        and not any(a.among for a in wrong)
        and {a.layer for a in wrong} <= {a.layer for a in mine if a.kind == FP8}
    )
    return fail(
        why.code,
        f"converted but not executed in FP8: {role} of {len(wrong)} of {len(mine)} {'calls' if often else 'layers'}",
        expected=f"{len(mine)} {role} products in FP8",
        seen=f"{len(mine) - len(wrong)} in FP8; {_kinds(wrong)}",
        cause=eval_cause(evidence) or (SOMETIMES if sometimes else why.cause),
        about=wrong[0].layer,
        next_step=why.next_step,
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
