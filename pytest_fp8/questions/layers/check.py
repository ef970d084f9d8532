"""Is FP8 really running? Conversion, recipe in force and executed products, judged together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.layers.beside import beside
from pytest_fp8.questions.layers.conversion import find_in_conversion, find_in_recipe
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.execution import find_in_execution
from pytest_fp8.questions.layers.products import StepProducts, role_table
from pytest_fp8.questions.layers.wire import find_on_wire, travelled
from pytest_fp8.questions.ledger.compare import find_in_ledger, find_where_gradients_are_missing
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, recipe_facts
from pytest_fp8.verdicts import Decision, Finding, passed

QUESTION = "layers"
COUNTED = {
    "fp8_layers": "Linears in FP8",
    **{f"fp8_{role}": f"{role} products in FP8 per step" for role in (*ROLES, RECOMPUTE)},
}
"""Counts that a baseline keeps, name -> unit. They are exact: one less fails."""


def check_layers(
    case: Case,
    evidence: LayersEvidence,
    baseline_share: Sequence[float] = (),
    baseline_counts: Mapping[str, int] | None = None,
    ledgers: TwoLedgers | None = None,
) -> Decision:
    """FAIL names the first thing that is wrong, from what was converted to what was executed.

    ``baseline_share``: the stored share of GEMM FLOPs in FP8; it is exact, so any loss of more than rounding fails.
    ``baseline_counts``: the stored counts of :data:`COUNTED`; any that is lower now fails. ``ledgers``: what both arms
    did besides FP8.
    """
    step = evidence.step(recipe_facts(case.backend, case.recipe).roles)
    numbers = summarise(evidence, step)
    found = (
        find_in_conversion(case, evidence)
        or find_in_recipe(case, evidence)
        # A forward pass that is repeated in high precision has its gradients there too: it is named before them.
        or find_in_execution(case, evidence, step, (FPROP, RECOMPUTE))
        or (find_where_gradients_are_missing(ledgers, QUESTION) if ledgers is not None else None)
        or find_in_execution(case, evidence, step, (DGRAD, WGRAD))
        or (find_on_wire(case, evidence, ledgers) if ledgers is not None else None)
        or (find_in_ledger(ledgers, QUESTION) if ledgers is not None else None)
        or _counts(counted(numbers), baseline_counts or {})
        or _scaling(evidence)
        or _share(numbers["fp8_share"], baseline_share)
    )
    if found is not None:
        return found.answer(QUESTION, numbers)
    notes = beside(evidence, ledgers)
    wire = travelled(ledgers.fp8) if ledgers is not None else ""
    said = [
        f"{numbers['converted']} of {numbers['linears']} Linears in FP8, "
        f"{numbers['fp8_share']:.1%} of the step's GEMM FLOPs",
        *notes,
        *([f"on the wire, a step of a rank: {wire}"] if wire else []),
    ]
    return passed("; ".join(said)).answer(QUESTION, {**numbers, "notes": notes})


def summarise(evidence: LayersEvidence, step: StepProducts) -> dict[str, Any]:
    """The decision's numbers: coverage by count, parameters and FLOPs, products per role, reasons to skip layers."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in evidence.originals.items()}
    reasons: dict[str, int] = {}
    for why in evidence.skipped.values():
        reasons[why] = reasons.get(why, 0) + 1
    return {
        "linears": len(evidence.originals),
        "converted": len(evidence.converted),
        "parameter_share": sum(sizes[n] for n in evidence.converted) / max(1, sum(sizes.values())),
        "fp8_share": step.fp8_share(),
        "roles": role_table(step, evidence.calls),
        "skipped": reasons,
        "stacked": list(evidence.stacked_weights),
        "attention": {name: list(kernels) for name, kernels in evidence.attention.items()},
    }


def counted(numbers: Mapping[str, Any]) -> dict[str, int]:
    """The counts of :data:`COUNTED` in a decision's numbers, without roles that did not run."""
    roles = {f"fp8_{role}": count["fp8"] for role, count in numbers["roles"].items()}
    return {"fp8_layers": numbers["converted"], **{name: n for name, n in roles.items() if name in COUNTED}}


def _counts(now: Mapping[str, int], baseline: Mapping[str, int]) -> Finding | None:
    for name, stored in baseline.items():
        if now.get(name, 0) < stored:
            return fail(
                UNCODED,
                f"fewer {COUNTED[name]} than in the baseline",
                expected=f"{stored}, exactly as stored",
                seen=f"{now.get(name, 0)}",
                cause="layers or products are left in high precision now that ran in FP8 before",
                next_step="compare the reasons for what was left, in the report",
            )
    return None


def _scaling(evidence: LayersEvidence) -> Finding | None:
    if evidence.stale_amax:
        return fail(
            UNCODED,
            f"the amax history of {len(evidence.stale_amax)} layers does not change in a training step",
            expected="a new entry in each layer's history after each step",
            seen=f"unchanged: {some(evidence.stale_amax)}",
            cause="the amax history is never updated: scales stay as they were, while weights and activations move",
            next_step="run forward and backward inside te.autocast, and never step around its exit",
        )
    return None


def _share(share: float, baseline: Sequence[float]) -> Finding | None:
    if baseline and share < min(baseline) - 1e-6:
        return fail(
            UNCODED,
            "less of the step runs in FP8 than in the baseline",
            expected=f"{min(baseline):.2%} of GEMM FLOPs",
            seen=f"{share:.2%}",
            cause="layers are left in high precision now that were converted before",
            next_step="compare the reasons for what was left, in the report",
        )
    return None
