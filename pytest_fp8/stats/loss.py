"""The loss rule: FP8's curves against BF16's over several seeds, with a margin. Pure.

The bounds of the margin were found on language models, whose losses are 1 to 12 nats. Of other losses they are shares.
docs/limits.md says where each number is from. Loads no numpy: the command line, which must answer at once, needs this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from pytest_fp8.stats.quantiles import robust_sigma, sample_sd, student_quantile
from pytest_fp8.verdicts import Verdict

LOSS_MARGIN = (0.02, 0.05)
"""Bounds of the margin, times :attr:`LossScale.value`."""
LARGE = 10.0
"""A loss of which the margin is a share again: a sum over a batch is no nats of one token."""
LOSS_CONFIDENCE = 0.95
"""Of a PASS, over all numbers of seeds at which the question may look again: the mean gap is below the margin."""
LOOK_ALPHA = {2: 0.003, 3: 0.025, 4: 0.02, 5: 0.015, 6: 0.012, 7: 0.01, 8: 0.01}
"""Seeds -> the chance of passing at this look where the true gap is the margin. The suite's first look has most."""
LOSS_ALPHA = 0.01
"""Chance of calling a case's loss too high although its true gap is the margin itself, over all numbers of seeds."""
MAX_LOSS_SEEDS = 8
"""Seeds at which the question stops looking again."""


def of_a_look(chance: float, seeds: int) -> float:
    """What one look spends of a chance that all looks share alike. More seeds than :data:`MAX_LOSS_SEEDS` are judged
    once, which may spend all of it."""
    return chance if seeds > MAX_LOSS_SEEDS else chance / (MAX_LOSS_SEEDS - 2)


ROUNDED_AWAY = 2.0**-16
"""Share of the largest loss below which a curve's end is rounding: bfloat16's eight bits leave 2**-8, squared."""
OF_ROUNDING = 2.0
"""A margin is wider by so many times what FP8's rounding adds to the reference's own last loss."""

LEARNS = 2.0
"""Standard errors that the reference's loss must fall by, from its first fifth to its last."""


@dataclass(frozen=True)
class LossGap:
    """FP8 loss less BF16 loss at the end of the horizon, in the loss's own unit: mean over seeds, bound, margin."""

    gap: float
    bound: float
    """Half-width of the one-sided interval over seeds that holds :data:`LOSS_CONFIDENCE` over all looks; infinite for
    one seed."""
    margin: float
    verdict: Verdict
    floor: float = math.inf
    """How far below the reference a loss may end without an explanation."""

    @property
    def below(self) -> bool:
        """Whether FP8 ends below the reference by more than noise."""
        return self.gap + self.bound < -self.floor


class NoShare(Enum):
    """Why a share of a loss means nothing."""

    CHANGES_SIGN = "changes sign"
    ROUNDED_AWAY = "is rounded away"


@dataclass(frozen=True)
class LossScale:
    """What a margin is a share of, in the loss's own unit."""

    value: float
    """1 for a reference's loss of 1 to :data:`LARGE` at the end, the absolute mean over its last fifth and over seeds;
    below that this loss itself, above it this loss divided by :data:`LARGE`; of one that is no cross-entropy itself."""
    why_none: NoShare | None = None
    """Why a share of that loss means nothing, so that no gap can be called too large."""
    spacing: float = 0.0
    """Distance of neighbouring numbers of the loss's type at its end: 0.25 for one of 46 in bfloat16."""
    nats: bool = True
    """Whether the loss is a cross-entropy. Of another one margins are shares, whatever its size."""

    @property
    def relative(self) -> bool:
        return not self.nats or self.value != 1

    def amount(self, loss: float) -> str:
        """A loss below 1 or above 10 need not be in nats, and four decimals may not show it."""
        return f"{loss:.3g}" if self.relative else f"{loss:.4f} nats"


def loss_scale(bf16: Sequence[Sequence[float]], eps: float = 0.0, nats: bool = True) -> LossScale:
    """The scale of the reference's curves, one per seed. ``eps``: the spacing of the loss's type at 1. ``nats``:
    whether it is a cross-entropy."""
    tails = [tail(losses) for losses in bf16]
    end = abs(_mean([_mean(losses) for losses in tails]))
    # min() and max() keep their first argument beside a NaN: the loss question judges what is not finite by itself.
    value = max(min(1.0, end), end / LARGE) if nats else end
    why = None
    if value < 1 or not nats:
        every = [x for losses in tails for x in losses]
        largest = max(abs(x) for losses in bf16 for x in losses)
        if min(every) < 0 < max(every):
            why = NoShare.CHANGES_SIGN
        elif value <= ROUNDED_AWAY * largest:
            why = NoShare.ROUNDED_AWAY
    # frexp: end is at least half of 2**exponent.
    spacing = math.ldexp(eps, math.frexp(end)[1] - 1) if math.isfinite(end) else 0.0
    return LossScale(value, why, spacing, nats)


def tail_gap(fp8: Sequence[float], bf16: Sequence[float]) -> float:
    """Mean of FP8 - BF16 over the last fifth of the steps (at least one), in the loss's own unit."""
    return _mean([mine - reference for mine, reference in zip(tail(fp8), tail(bf16), strict=True)])


def tail(losses: Sequence[float]) -> Sequence[float]:
    """The last fifth of a curve, at least one step: the end that is judged."""
    return losses[-max(1, len(losses) // 5) :]


def loss_noise(bf16_gaps: Sequence[float]) -> float:
    """Three standard deviations of BF16-against-BF16 tail gaps about zero; 0 where there are none."""
    return 3 * math.sqrt(_mean([gap * gap for gap in bf16_gaps])) if bf16_gaps else 0.0


def loss_margin(
    bf16_gaps: Sequence[float], scale: LossScale, fp8_gaps: Sequence[float] = (), rounding: float = 0.0
) -> float:
    """:func:`loss_noise` of the arm that has more of it, kept within :data:`LOSS_MARGIN` times the scale; no less than
    the loss's own spacing. And :data:`OF_ROUNDING` times the ``rounding``: by how much FP8's raises the last loss of
    weights that BF16 has trained, however well they were trained."""
    noise = max(loss_noise(bf16_gaps), loss_noise(fp8_gaps))
    low, high = (share * scale.value for share in LOSS_MARGIN)
    return max(min(max(noise, low), high), scale.spacing) + OF_ROUNDING * rounding


def decide_loss(gaps: Sequence[float], margin: float, noise: float = 0.0, floor: float = math.inf) -> LossGap:
    """PASS when the mean gap is below the margin with ``LOSS_CONFIDENCE`` and not below ``-floor`` with as much. FAIL
    when it is above the margin and above ``noise``, with ``LOSS_ALPHA``. Both are shared by all numbers of seeds at
    which the question may look again. Else INCONCLUSIVE. Gaps that are all 0 pass any margin, even one of 0.

    Few seeds can be close to each other by chance. Student's t is the only guard against that, so a FAIL needs more
    confidence than a PASS.
    """
    mean = _mean(gaps)
    seeds = len(gaps)
    bound = proven = math.inf
    if seeds > 1:
        error = sample_sd(gaps) / math.sqrt(seeds)
        bound = student_quantile(1 - LOOK_ALPHA.get(seeds, 1 - LOSS_CONFIDENCE), seeds - 1) * error
        proven = student_quantile(1 - of_a_look(LOSS_ALPHA, seeds), seeds - 1) * error
    if -floor <= mean + bound < margin or (seeds > 1 and not any(gaps)):
        verdict = Verdict.PASS
    elif mean - proven > max(margin, noise):
        verdict = Verdict.FAIL
    else:
        verdict = Verdict.INCONCLUSIVE
    return LossGap(mean, bound, margin, verdict, floor)


def compare_curves(
    fp8: Sequence[Sequence[float]],
    bf16: Sequence[Sequence[float]],
    bf16_gaps: Sequence[float],
    fp8_gaps: Sequence[float] = (),
    eps: float = 0.0,
    nats: bool = True,
    rounding: float = 0.0,
) -> LossGap:
    """Decide on the losses of both arms, one curve per seed, with :func:`decide_loss`.

    ``bf16_gaps``, ``fp8_gaps``: tail gaps of each arm against itself, one rounding apart. The rule does not depend on
    the unit: gaps and margin divided by the scale decide alike. Where the scale is not 1, a FAIL also needs a gap
    beyond BF16's own noise, which can be far above the margin of a loss near zero. Where no share of the loss means
    anything, there is no FAIL. ``eps``, ``nats``: as for :func:`loss_scale`; ``rounding``: as for :func:`loss_margin`.

    The floor is the largest margin, or the noise of either arm.
    """
    gaps = [tail_gap(mine, reference) for mine, reference in zip(fp8, bf16, strict=True)]
    scale = loss_scale(bf16, eps, nats)
    noise = 0.0
    floor = max(LOSS_MARGIN[1] * scale.value, scale.spacing, loss_noise(bf16_gaps), loss_noise(fp8_gaps))
    if scale.relative:
        noise = math.inf if scale.why_none else loss_noise(bf16_gaps)
        floor = math.inf if scale.why_none else floor
    return decide_loss(gaps, loss_margin(bf16_gaps, scale, fp8_gaps, rounding), noise, floor)


@dataclass(frozen=True)
class Fall:
    """How far a loss fell from the first fifth of its curves to the last, on average over seeds."""

    amount: float
    error: float
    """Its standard error, from how much the loss changes from step to step."""

    @property
    def learns(self) -> bool:
        return self.amount > LEARNS * self.error


def loss_fall(curves: Sequence[Sequence[float]]) -> Fall:
    """The fall of the losses of one arm, one curve per seed.

    A step's noise is taken from the differences between neighbouring steps, which a slow fall hardly changes.
    """
    falls, variances = [], []
    for losses in curves:
        end = tail(losses)
        falls.append(_mean(losses[: len(end)]) - _mean(end))
        step = robust_sigma([after - before for before, after in pairwise(losses)]) / math.sqrt(2)
        variances.append(2 * step**2 / len(end))
    return Fall(_mean(falls), math.sqrt(sum(variances)) / len(curves))


def _mean(values: Sequence[float]) -> float:
    """Not by :mod:`statistics`, which raises for infinities of both signs."""
    return sum(values) / len(values)
