"""Loss curves of both arms, and how they are gathered: seed by seed, while a caller wants more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fp8.questions.ledger.evidence import ArmLedger
from pytest_fp8.stats.loss import LARGE, MAX_LOSS_SEEDS, end_of, least_margin

START = 4
"""Steps of a start. What an arm keeps from one curve for the next shows in the first steps of the next."""
RUNS_OF_ONE_CURVE = 4
"""With which looking ends where all seeds give one curve: further ones are no other training."""
CROSS_ENTROPY = ("log_softmax", "nll_loss", "logsumexp", "cross_entropy")
"""Parts of the names of operators that only a loss in nats takes."""


@dataclass(frozen=True)
class Moved:
    """One trained parameter over a curve."""

    elements: int
    moved: float
    """Share of its elements whose value differs from the start."""
    reached: float
    """Share of its elements that had a gradient other than 0 in some step."""


@dataclass(frozen=True)
class ProductCount:
    """Matrix products in one part of one step."""

    fp8: int
    other: int
    """In another precision."""


@dataclass(frozen=True)
class Course:
    """What an arm did in a curve, beside its losses."""

    rates: Sequence[Mapping[str, Sequence[float]]] = ()
    """``lr`` and what else a schedule may move, of each group of the optimizer, at the start and after each training
    step."""
    stepped: Sequence[int] = ()
    """How often the optimizer stepped in each training step."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> what the optimizer keeps for it at the end, in words: ``exp_avg bfloat16, exp_avg_sq bfloat16``."""
    left: Sequence[str] = ()
    """Parameters that hold a gradient other than 0 after the last step."""
    modes: Mapping[str, bool] = field(default_factory=dict)
    """Module -> whether it is in train mode after the last step; not of Linears."""
    alone: Mapping[str, bool] = field(default_factory=dict)
    """Parameter or buffer that the optimizer does not step -> whether it changed over the curve."""


@dataclass(frozen=True)
class Look:
    """A few values of one product of a layer: how far they are from the exact ones, as mean squares."""

    step: int
    error: float
    """Over the mean square of the product."""
    of_finest: float
    """Over the error of FP8 with a scale for each row and column."""
    of_coarsest: float
    """Over that of FP8 with one scale for each operand."""


@dataclass(frozen=True)
class LayerCalls:
    """The FP8 layers' calls in the forward passes of each step; empty where they were not watched, as where code is
    compiled."""

    fp8: Sequence[int] = ()
    """Calls in each step that multiplied in FP8."""
    other: Sequence[int] = ()
    """Calls that did not."""
    looks: Mapping[str, Sequence[Look]] = field(default_factory=dict)
    """By layer, of some layers in each step."""


@dataclass(frozen=True)
class Curve:
    """One training run, step by step."""

    seed: int
    losses: Sequence[float]
    """In nats, or in the unit of the user's own loss."""
    gradient_norms: Sequence[float]
    """L2 norm of all gradients."""
    eps: float = 0.0
    """Spacing at 1 of the type in which the losses were computed: 2**-7 for bfloat16."""
    data: int = 0
    """Checksum of the batches of all steps."""
    data_at_start: int = 0
    """The same of the first :data:`START` steps."""
    course: Course = field(default_factory=Course)
    movement: Mapping[str, Moved] = field(default_factory=dict)
    """Parameter that the optimizer steps, by the name that it has before a conversion."""
    first_products: Mapping[str, ProductCount] = field(default_factory=dict)
    """Phase of the step -> products of the first step; empty where it was not watched."""
    last_products: Mapping[str, ProductCount] = field(default_factory=dict)
    """The same of the last step."""
    calls: LayerCalls = field(default_factory=LayerCalls)

    @property
    def finite(self) -> bool:
        return all(math.isfinite(x) for x in (*self.losses, *self.gradient_norms))


@dataclass(frozen=True)
class LossEvidence:
    """Curves by seed, of the FP8 arm and of the reference."""

    fp8: Mapping[int, Curve]
    bf16: Mapping[int, Curve]
    noisy: Mapping[int, Curve] = field(default_factory=dict)
    """The reference's with noise of FP8's size in each step: the yardstick. Empty where it was not needed."""
    again: Curve | None = None
    """The first steps of the reference's first curve, trained again after all curves; ``None`` where a curve shows by
    itself that there is nothing to judge."""
    noisy_starts: Sequence[Sequence[float]] = ()
    """Losses of these steps with noise, in several ways. Empty where not needed."""
    nats: bool = True
    """Whether the loss is a cross-entropy."""
    one_curve: bool = False
    """Whether all seeds give one curve. Those after the first are then its runs from weights one rounding away."""

    @property
    def end(self) -> float:
        """Where the reference ends, an absolute value."""
        return end_of([self.bf16[s].losses for s in sorted(self.fp8)])

    @property
    def least(self) -> float:
        """The least margin, in the loss's own unit."""
        return least_margin(self.end, self.eps, self.nats)

    @property
    def in_nats(self) -> bool:
        """Whether losses and margins are told in nats: a cross-entropy of another size need be none of one token."""
        return self.nats and 1 <= self.end <= LARGE

    def amount(self, loss: float) -> str:
        """A loss in words. Four decimals may not show one below 1."""
        return f"{loss:.4f} nats" if self.in_nats else f"{loss:.3g}"

    @property
    def eps(self) -> float:
        """Spacing at 1 of the coarser arm's losses."""
        return max(curve.eps for curve in (*self.fp8.values(), *self.bf16.values()))


def largest_number(one_curve: bool) -> int:
    """Of seeds, or of the runs of one curve, with which looking ends."""
    return RUNS_OF_ONE_CURVE if one_curve else MAX_LOSS_SEEDS


def is_cross_entropy(reference: ArmLedger) -> bool:
    """Whether the step takes a logarithm of probabilities. Where its operators could not be watched, it may."""
    names = {operator for counts in reference.operators.values() for operator in counts}
    return not reference.watched or any(word in name for name in names for word in CROSS_ENTROPY)
