"""Loss curves of both arms, and how they are gathered: seed by seed, while a caller wants more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pytest_fp8.questions.ledger.evidence import ArmLedger
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS, LossScale, loss_scale

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

    rates: Sequence[Sequence[float]] = ()
    """The learning rate of each group of the optimizer, at the start and after each training step."""
    stepped: Sequence[int] = ()
    """How often the optimizer stepped in each training step."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> what the optimizer keeps for it at the end, in words: ``exp_avg bfloat16, exp_avg_sq bfloat16``."""
    left: Sequence[str] = ()
    """Parameters that hold a gradient other than 0 after the last step."""
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
    """Curves by seed: of the FP8 arm, of the reference, and of each with its weights moved by one rounding (``twin``,
    ``fp8_twin``), which shows how far two honest runs of one arm drift apart."""

    fp8: Mapping[int, Curve]
    bf16: Mapping[int, Curve]
    twin: Mapping[int, Curve]
    fp8_twin: Mapping[int, Curve] = field(default_factory=dict)
    moved_first: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Seed -> the reference's first losses with its Linears' weights moved at random by as much as FP8 moves products.
    Empty where the arms' first losses are close."""
    moved_last: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Seed -> by how much the reference's last loss rises with weights moved so. Empty where no margin is narrow."""
    unfinished: bool = False
    """Whether the FP8 arm's twins, which can widen the margin, are still to come."""
    nats: bool = True
    """Whether the loss is a cross-entropy."""
    one_curve: bool = False
    """Whether all seeds give one curve. Those after the first are then its runs from weights one rounding away."""

    @property
    def scale(self) -> LossScale:
        """What margins are shares of."""
        return loss_scale([self.bf16[s].losses for s in sorted(self.fp8)], self.eps, self.nats)

    @property
    def rounding(self) -> float:
        """By how much FP8's rounding raises the reference's last loss, in the mean; 0 where it was not asked."""
        rises = list(chain.from_iterable(self.moved_last.values()))
        return max(0.0, sum(rises) / len(rises)) if rises else 0.0

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
