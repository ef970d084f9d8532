"""What FP8's rounding does to a loss, whatever was learnt: asked of the reference where the margin is narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.rules.loss import MAX_LOSS_SEEDS, LossGap
from pytest_fp8.verdicts import Verdict

SEEDS = 3
"""Whose last loss is asked. It costs a curve of the reference each."""
DRAWS = 4
"""Ways in which the weights of one seed are moved. One can leave a loss where it is by chance."""


def with_rounding(
    arms: PairArms, looks: Iterator[LossEvidence], judge: Callable[[LossEvidence], LossGap]
) -> Iterator[LossEvidence]:
    """The looks, with ``moved_last`` from the first one on that fails without it, or with which looking ends.

    A squared error near zero and a loss that falls steeply are changed by the rounding of the forward pass alone by
    more than a share of them: the weights that BF16 has trained show by how much. Raises ``ArmError``.
    """
    asked = False
    for evidence in looks:
        gap = judge(evidence)
        last = len(evidence.fp8) >= MAX_LOSS_SEEDS and not evidence.unfinished
        asked |= gap.gap > 0 and (gap.verdict is Verdict.FAIL or (gap.verdict is Verdict.INCONCLUSIVE and last))
        yield replace(evidence, moved_last=_moved_last(arms, evidence)) if asked else evidence


def _moved_last(arms: PairArms, evidence: LossEvidence) -> dict[int, Sequence[float]]:
    found = moved_losses(arms, sorted(evidence.bf16)[:SEEDS], arms.case.horizon - 1)
    return {seed: [each - loss for each in moved] for seed, (loss, *moved) in found.items()}


def moved_losses(arms: PairArms, seeds: Sequence[int], step: int) -> dict[int, list[float]]:
    """By seed: the reference's loss of this step, and then from weights that are moved. Asked once for all cases that
    share the reference. Raises ``ArmError``."""

    def ask(seed: int) -> list[float]:
        losses: list[float] = arms.bf16.request("moved_losses", seed=seed, step=step, draws=DRAWS)
        return losses

    return {s: arms.shared(f"moved losses {step} {s}", lambda s=s: ask(s)) for s in seeds}  # type: ignore[misc]
