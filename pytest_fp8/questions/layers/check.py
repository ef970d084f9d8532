"""Is FP8 really running? Conversion, recipe in force and executed products, judged together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.case import Case
from pytest_fp8.codes import L
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.beside import beside, matches_nothing
from pytest_fp8.questions.layers.conversion import find_in_conversion, find_in_recipe
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.execution import find_in_execution, find_on_wire, find_past_layers, travelled
from pytest_fp8.questions.layers.products import StepProducts, role_table
from pytest_fp8.questions.ledger.compare import find_in_ledger, find_where_gradients_are_missing
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, Role, recipe_facts
from pytest_fp8.verdicts import Decision, Figures, Finding, passed

QUESTION = "layers"
COUNTED = {
    "fp8_layers": "Linears in FP8",
    **{f"fp8_{role}": f"{role} products in FP8 per step" for role in (*ROLES, RECOMPUTE)},
}
"""Counts that a baseline keeps, name -> unit. They are exact: one less fails."""


@dataclass(frozen=True)
class LayersFigures(Figures):
    """How much of the model and of its step is in FP8."""

    linears: int
    converted: int
    """Linears in FP8, those of a class of the user's own included."""
    fp8_share: float
    """Of the step's GEMM FLOPs."""
    roles: Mapping[Role, Mapping[str, int]]
    """Role -> products that are ``expected`` of the FP8 layers, and those of them that ran in ``fp8``."""
    skipped: Mapping[str, int]
    """Reason -> Linears that stay in high precision for it."""
    attention: Mapping[str, Sequence[str]]
    """Attention operator -> its kernels."""
    notes: Sequence[str] = ()
    """What a PASS says besides."""

    def counted(self) -> dict[str, int]:
        """The counts of :data:`COUNTED`, without roles that did not run."""
        roles = {f"fp8_{role}": count["fp8"] for role, count in self.roles.items()}
        return {"fp8_layers": self.converted, **{name: n for name, n in roles.items() if name in COUNTED}}


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
    roles = recipe_facts(case.backend, case.recipe).roles
    step = evidence.step(roles)
    figures = _figures(evidence, step)
    found = (
        find_in_conversion(case, evidence)
        or find_in_recipe(case, evidence)
        # A forward pass that is repeated in high precision has its gradients there too: it is named before them.
        or find_in_execution(case, evidence, step, (FPROP, RECOMPUTE))
        or (find_where_gradients_are_missing(ledgers, QUESTION) if ledgers is not None else None)
        or find_in_execution(case, evidence, step, (DGRAD, WGRAD))
        or (find_on_wire(case, evidence, ledgers) if ledgers is not None else None)
        or (find_in_ledger(ledgers, QUESTION) if ledgers is not None else None)
        # Where the reference does call the layer, that has been said.
        or find_past_layers(case, evidence)
        or less_than_stored(figures, baseline_share, baseline_counts or {})
        or _scaling(evidence)
    )
    if found is not None:
        return found.answer(QUESTION, figures)
    notes = beside(case, evidence, step, ledgers)
    wire = travelled(ledgers.fp8) if ledgers is not None else ""
    said = [
        f"{figures.converted} of {figures.linears} Linears in FP8, {figures.fp8_share:.1%} of the step's GEMM FLOPs",
        *notes,
        *([f"on the wire, a step of a rank: {wire}"] if wire else []),
    ]
    return passed("; ".join(said)).answer(QUESTION, replace(figures, notes=notes))


def strictly(decision: Decision, evidence: LayersEvidence) -> Decision:
    """The decision of :func:`check_layers` as ``--fp8-strict`` has it: a PASS with a pattern of ``leave`` that matches
    no Linear is FAIL. Elsewhere that is a note: workloads of several models may share their patterns."""
    figures = decision.figures
    if not evidence.unmatched or not decision.verdict.passes or not isinstance(figures, LayersFigures):
        return decision
    found = finding(
        L.LEAVES_NOTHING,
        f"patterns for whole names of the model's Linears: {some(list(evidence.originals))}",
        decision.headline.partition(";")[0],
        patterns=some([repr(pattern) for pattern in evidence.unmatched]),
    )
    notes = [note for note in figures.notes if note != matches_nothing(evidence.unmatched)]
    return found.answer(QUESTION, replace(figures, notes=notes))


def _figures(evidence: LayersEvidence, step: StepProducts) -> LayersFigures:
    return LayersFigures(
        linears=len(evidence.originals),
        converted=len({*evidence.converted, *evidence.of_own}),
        fp8_share=step.fp8_share(),
        roles=role_table(step, evidence.calls),
        skipped=Counter(map(str, evidence.skipped.values())),
        attention=evidence.attention,
    )


def less_than_stored(figures: LayersFigures, share: Sequence[float], counts: Mapping[str, int]) -> Finding | None:
    now = figures.counted()
    less = [
        (f"fewer {COUNTED[name]} than in the baseline", f"{stored}, exactly as stored", f"{now.get(name, 0)}")
        for name, stored in counts.items()
        if now.get(name, 0) < stored
    ]
    if share and figures.fp8_share < min(share) - 1e-6:
        expected, seen = f"{min(share):.2%} of GEMM FLOPs", f"{figures.fp8_share:.2%}"
        less.append(("less of the step runs in FP8 than in the baseline", expected, seen))
    what, expected, seen = less[0] if less else ("", "", "")
    return finding(L.LESS_THAN_BASELINE, expected, seen, what=what) if less else None


def _scaling(evidence: LayersEvidence) -> Finding | None:
    expected, stale = "a new entry in each layer's history after each step", evidence.stale_amax
    return finding(L.STALE_AMAX, expected, f"unchanged: {some(stale)}", count=len(stale)) if stale else None
