"""What FP8's rounding does to a loss, asked of the reference with moved weights: to its first, and to its last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_fp8.case import Case
from pytest_fp8.codes import C
from pytest_fp8.plan import REFERENCE, Ask, Asking
from pytest_fp8.questions.loss.evidence import LossEvidence
from pytest_fp8.stats.loss import LossGap
from pytest_fp8.verdicts import Finding, Verdict

FIRST_STEP = 0.02
"""Difference of the first step's loss, as a share of the reference's largest, up to which nothing else is asked."""
FIRST_STEP_OF_BOTH_SIGNS = 0.5
"""The same where the reference's losses have both signs: they are differences of larger terms."""
OF_MOVED = (4.0, 8.0)
"""INCONCLUSIVE, and FAIL, from so many times what moved weights do to the reference's own first loss (root mean squares
over seeds)."""
SEEDS = 3
"""Whose last loss is asked. It costs a curve of the reference each."""
DRAWS = 4
"""Ways in which the weights of one seed are moved. One can leave a loss where it is by chance."""


def first_step(evidence: LossEvidence) -> Finding | None:
    """The arms' first losses lie further apart than FP8's rounding explains."""
    by_seed = _apart(evidence)
    apart, moved = _rms(list(by_seed.values())), _moved(evidence)
    enough = _enough(evidence)
    limit = max(enough, OF_MOVED[0] * moved)
    if apart <= limit:
        return None
    seed = max(by_seed, key=lambda s: by_seed[s])
    losses, amount = evidence.bf16[seed].losses, evidence.scale.amount
    largest = _largest(losses)
    of = "" if abs(losses[0]) == largest else f" of {amount(largest)}, the curve's largest loss"
    return Finding(
        C.FIRST_STEP,
        Verdict.FAIL if apart > max(enough, OF_MOVED[1] * moved) else Verdict.INCONCLUSIVE,
        "the arms disagree at the very first step",
        expected=f"{amount(losses[0])} within {limit:.0%}{of}",
        seen=f"{amount(evidence.fp8[seed].losses[0])} at step 0, seed {seed}",
        cause="the arms do not have the same weights or data, or a layer's scale is wrong; or the model keeps "
        "state outside its parameters and buffers (a counter in a Python attribute), which no curve restarts; or "
        "the conversion dropped what a Linear did besides its product: a subclass's own forward, a hook",
        next_step="compare the two models' weights: fp8_pair.fp8.call(lambda model: ...); register such state as "
        "a buffer, or take the step from the batch; move such behaviour out of the Linear, or leave=(its name,)",
    )


def with_moved_first_losses(evidence: LossEvidence) -> Asking[LossEvidence]:
    """The evidence with ``moved_first`` where the first losses lie too far apart to need no yardstick. Most
    models' do not, and their reference is not asked."""
    if not _enough(evidence) < _rms(list(_apart(evidence).values())) < math.inf:
        return evidence
    found = yield from moved_losses(sorted(evidence.bf16), step=0)
    return replace(evidence, moved_first={seed: losses[1:] for seed, losses in found.items()})


def _enough(evidence: LossEvidence) -> float:
    """Up to which share first losses need no yardstick."""
    every = [loss for curve in evidence.bf16.values() for loss in curve.losses]
    return FIRST_STEP if min(every) >= 0 or max(every) <= 0 else FIRST_STEP_OF_BOTH_SIGNS


def _apart(evidence: LossEvidence) -> dict[int, float]:
    """Seed -> difference of the first losses, as a share of the reference's largest."""
    return {
        s: _share(abs(evidence.fp8[s].losses[0] - evidence.bf16[s].losses[0]), evidence.bf16[s].losses)
        for s in sorted(evidence.fp8)
    }


def _moved(evidence: LossEvidence) -> float:
    """The same of the reference with moved weights, over all seeds and draws; 0 where it was not asked."""
    shares = [
        _share(abs(loss - evidence.bf16[s].losses[0]), evidence.bf16[s].losses)
        for s, losses in evidence.moved_first.items()
        for loss in losses
    ]
    return _rms([share for share in shares if math.isfinite(share)])


def _share(value: float, losses: Sequence[float]) -> float:
    largest = _largest(losses)
    return value / largest if largest else 0.0


def _largest(losses: Sequence[float]) -> float:
    return max(abs(loss) for loss in losses)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0


def wants_rounding(gap: LossGap, last: bool) -> bool:
    """Whether ``moved_last`` is asked: of a gap that fails without it, or with which looking ends.

    A squared error near zero and a loss that falls steeply are changed by the rounding of the forward pass alone by
    more than a share of them: the weights that BF16 has trained show by how much.
    """
    return gap.gap > 0 and (gap.verdict is Verdict.FAIL or (gap.verdict is Verdict.INCONCLUSIVE and last))


def with_rounding(case: Case, evidence: LossEvidence) -> Asking[LossEvidence]:
    """The evidence with ``moved_last``."""
    found = yield from moved_losses(sorted(evidence.bf16)[:SEEDS], case.steps - 1)
    return replace(evidence, moved_last={s: [each - loss for each in moved] for s, (loss, *moved) in found.items()})


def moved_losses(seeds: Sequence[int], step: int) -> Asking[dict[int, list[float]]]:
    """By seed: the reference's loss of this step, and then from weights that are moved."""
    found = yield tuple(Ask(REFERENCE, "moved_losses", seed=seed, step=step, draws=DRAWS) for seed in seeds)
    return dict(zip(seeds, found, strict=True))
