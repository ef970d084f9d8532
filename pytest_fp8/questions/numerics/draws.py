"""Further ways in which the reference's weights are moved, asked where a gradient looks wrong beside the first one."""

from __future__ import annotations

from dataclasses import replace

from pytest_fp8.plain import from_plain
from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.numerics.evidence import Gradients, NumericsEvidence
from pytest_fp8.questions.numerics.gradients import differences
from pytest_fp8.questions.numerics.limits import limits_of

DRAWS = 8
"""A router sends a row another way in some of them: seen in one to seven of nine. Of 480 sound pairs on emulated FP8
(24 workloads, ten seeds, two recipes) 7 look wrong beside one way of moving weights, by up to 2.2 times the limit.
Beside nine ways none of these is above 0.5 of it."""
OPERANDS = 4
"""Further ways in which what Linears are given is moved instead, each value on its own, as FP8 rounds it. Where
gradients cancel between rows, as those of a softmax over choices do, they still cancel beside moved weights. Of four
sound pairs that choose so (BERT, four seeds) all look wrong beside nine ways of moving weights, by up to 2.1 times the
limit. With these none is above 0.7 of it; with products moved in place of what goes into them one still looked wrong.
"""


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
