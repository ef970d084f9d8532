"""Further ways in which the reference's weights are moved, asked where a gradient looks wrong beside the first one."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.plain import from_plain
from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.numerics.evidence import Gradients, NumericsEvidence
from pytest_fp8.questions.numerics.gradients import differences
from pytest_fp8.questions.numerics.limits import limits_of

DRAWS = 8
"""A router sends a row another way in some of them."""
OPERANDS = 4
"""Further ways in which what Linears are given is moved instead, each value on its own, as FP8 rounds it. Gradients
that cancel between rows still cancel beside moved weights."""


def with_further_draws(arms: PairArms, evidence: NumericsEvidence) -> NumericsEvidence:
    """The evidence with ``further`` where a gradient looks wrong. Sound arms of most models have none, and their
    reference is not asked. Raises ``ArmError``."""
    limits = limits_of(arms.case.backend, arms.case.recipe)
    if not any(difference.wrong(limits) for difference in differences(evidence)):
        return evidence

    def ask() -> list[Gradients]:
        found = arms.bf16.request("moved_gradients", draws=DRAWS, operands=OPERANDS)
        return [from_plain(Gradients, each) for each in found]

    return replace(evidence, further=arms.shared("moved gradients", ask))
