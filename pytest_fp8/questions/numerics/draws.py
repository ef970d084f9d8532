"""Further ways in which the reference's weights are moved, asked where a gradient looks wrong beside the first one."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.case import Case
from pytest_fp8.plain import from_plain
from pytest_fp8.plan import REFERENCE, Ask, Asking
from pytest_fp8.questions.numerics.evidence import Gradients, NumericsEvidence
from pytest_fp8.questions.numerics.gradients import differences
from pytest_fp8.questions.numerics.limits import limits_of

DRAWS = 8
"""A router sends a row another way in some of them."""
OPERANDS = 4
"""Further ways in which what Linears are given is moved instead, each value on its own, as FP8 rounds it. Gradients
that cancel between rows still cancel beside moved weights."""


def with_further_draws(case: Case, evidence: NumericsEvidence) -> Asking[NumericsEvidence]:
    """The evidence with ``further`` where a gradient looks wrong. Sound arms of most models have none, and their
    reference is not asked."""
    limits = limits_of(case.backend, case.recipe)
    if not any(difference.wrong(limits) for difference in differences(evidence)):
        return evidence
    found = yield Ask(REFERENCE, "moved_gradients", draws=DRAWS, operands=OPERANDS)
    return replace(evidence, further=[from_plain(Gradients, each) for each in found])
