"""The loss rule: FP8's curves against BF16's over several seeds, with a margin. Pure.

How far noise of FP8's size moves the reference's own curves says how far FP8 may end above it: that yardstick has the
loss's own unit. docs/limits.md says where each number is from. Loads no numpy: the command line, which must answer at
once, needs this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_fp8.stats.quantiles import chi_square_quantile, robust_sigma, sample_sd, student_quantile
from pytest_fp8.verdicts import Verdict

LOSS_MARGIN = 0.02
"""The least margin, in nats; of a loss that ends below 1, or is no cross-entropy, this share of it."""
LARGE = 10.0
"""A cross-entropy of which the least margin is a share of its tenth: a sum over a batch is no nats of one token."""
OF_NOISE = 3.0
"""Or so many times what noise of FP8's size moves the reference's end by (root mean square), if that is more."""
OF_FALL = 0.25
"""But at most this share of what the reference's loss falls by: noise that undoes more teaches nothing about FP8."""
LOWER = 2.5
"""How far below the reference a loss may end without an explanation, in least margins; or by its noise, as above."""
LOSS_CONFIDENCE = 0.95
"""Of a PASS, over all numbers of seeds at which the question may look again: the mean gap is below the margin."""
LOOK_ALPHA = {2: 0.003, 3: 0.025, 4: 0.02, 5: 0.015, 6: 0.012, 7: 0.01, 8: 0.01}
"""Seeds -> the chance of passing at this look where the true gap is the margin. The suite's first look has most."""
LOSS_ALPHA = 0.01
"""Chance of calling a case's loss too high although its true gap is the margin itself, over all numbers of seeds."""
MAX_LOSS_SEEDS = 8
"""Seeds at which the question stops looking again."""
STILL_MOVES = 0.5
"""Standard errors by which further seeds may move the mean, where it is asked whether they could decide."""


def of_a_look(chance: float, seeds: int) -> float:
    """What one look spends of a chance that all looks share alike. More seeds than :data:`MAX_LOSS_SEEDS` are judged
    once, which may spend all of it."""
    return chance if seeds > MAX_LOSS_SEEDS else chance / (MAX_LOSS_SEEDS - 2)


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
    noise: float = 0.0
    """:data:`OF_NOISE` times the yardstick; 0 where it was not asked."""
    hopeless: bool = False
    """Whether these seeds leave it open, and :data:`MAX_LOSS_SEEDS` are not likely to decide."""

    @property
    def below(self) -> bool:
        """Whether FP8 ends below the reference by more than noise."""
        return self.gap + self.bound < -self.floor


def end_of(bf16: Sequence[Sequence[float]]) -> float:
    """Where the reference's curves end, one per seed: the absolute mean over their tails."""
    return abs(_mean([_mean(tail(losses)) for losses in bf16]))


def least_margin(end: float, eps: float = 0.0, nats: bool = True) -> float:
    """:data:`LOSS_MARGIN` of a loss that ends there, in its own unit; no less than the :func:`spacing` of its type.
    ``nats``: whether it is a cross-entropy."""
    # min() and max() keep their first argument beside a NaN: the loss question judges what is not finite by itself.
    return max(LOSS_MARGIN * (max(min(1.0, end), end / LARGE) if nats else end), spacing(end, eps))


def spacing(loss: float, eps: float) -> float:
    """The distance of neighbouring numbers of the loss's type there, from that at 1: 2**-7 for bfloat16."""
    # frexp: a loss is at least half of 2**exponent.
    return math.ldexp(eps, math.frexp(loss)[1] - 1) if math.isfinite(loss) else 0.0


def tail_gap(fp8: Sequence[float], bf16: Sequence[float]) -> float:
    """Mean of FP8 - BF16 over the last fifth of the steps (at least one), in the loss's own unit."""
    return _mean([mine - reference for mine, reference in zip(tail(fp8), tail(bf16), strict=True)])


def tail(losses: Sequence[float]) -> Sequence[float]:
    """The last fifth of a curve, at least one step: the end that is judged."""
    return losses[-max(1, len(losses) // 5) :]


def compare_curves(
    fp8: Sequence[Sequence[float]],
    bf16: Sequence[Sequence[float]],
    least: float,
    noisy: Sequence[Sequence[float]] = (),
) -> LossGap:
    """Decide on the losses of both arms, one curve per seed. ``least``: :func:`least_margin`. ``noisy``: the
    reference's curves with noise of FP8's size, for as many seeds, or none."""
    noise = OF_NOISE * root_mean_square([tail_gap(*pair) for pair in zip(noisy, bf16, strict=bool(noisy))])
    return decide_loss([tail_gap(*pair) for pair in zip(fp8, bf16, strict=True)], least, noise, loss_fall(bf16).amount)


def decide_loss(gaps: Sequence[float], least: float, noise: float = 0.0, fall: float = math.inf) -> LossGap:
    """PASS when the mean gap is below the margin with ``LOSS_CONFIDENCE`` and not below the floor with as much. FAIL
    when it is above the margin and above the ``noise``, with ``LOSS_ALPHA``. Both are shared by all numbers of seeds at
    which the question may look again. Else INCONCLUSIVE. Gaps that are all 0 pass any margin, even one of 0.

    ``noise``: :data:`OF_NOISE` times the yardstick; the margin takes of it what is no more than :data:`OF_FALL` of the
    ``fall``. Few seeds can be close to each other by chance. Student's t is the only guard against that, so a FAIL
    needs more confidence than a PASS.
    """
    margin, floor = max(least, min(noise, OF_FALL * fall)), max(LOWER * least, noise)
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
    few = verdict is Verdict.INCONCLUSIVE and 1 < seeds < MAX_LOSS_SEEDS
    hopeless = few and not _may_decide(gaps, margin, max(margin, noise))
    return LossGap(mean, bound, margin, verdict, floor, noise, hopeless)


def _may_decide(gaps: Sequence[float], low: float, high: float) -> bool:
    """Whether :data:`MAX_LOSS_SEEDS` may bring the bound below ``low``, or prove a mean above ``high``: with the least
    spread that these gaps allow (the lower limit of a 95 % interval of their variance, from chi-square)."""
    mean, spread, seeds, more = _mean(gaps), sample_sd(gaps), len(gaps), MAX_LOSS_SEEDS
    moves = STILL_MOVES * spread / math.sqrt(seeds)
    least = spread * math.sqrt((seeds - 1) / chi_square_quantile(0.95, seeds - 1) / more)
    passes, fails = LOOK_ALPHA[more], of_a_look(LOSS_ALPHA, more)
    return (
        mean - moves + student_quantile(1 - passes, more - 1) * least < low
        or mean + moves - student_quantile(1 - fails, more - 1) * least > high
    )


def root_mean_square(values: Sequence[float]) -> float:
    """About zero; 0 where there are none, infinite where one is not finite."""
    found = math.sqrt(_mean([value * value for value in values])) if values else 0.0
    return math.inf if math.isnan(found) else found


@dataclass(frozen=True)
class Fall:
    """How far a loss fell from the first fifth of its curves to the last, on average over seeds."""

    amount: float
    error: float
    """Its standard error, from how much the loss changes from step to step."""

    @property
    def learns(self) -> bool:
        return self.amount > LEARNS * self.error

    @property
    def rises(self) -> bool:
        return self.amount < -LEARNS * self.error


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
