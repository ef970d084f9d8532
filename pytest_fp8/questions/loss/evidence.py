"""Loss curves of both arms, and how they are gathered: seed by seed, while a caller wants more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.plain import from_plain
from pytest_fp8.questions.arms import PairArms
from pytest_fp8.rules.loss import MAX_LOSS_SEEDS


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
class Curve:
    """One training run, step by step."""

    seed: int
    losses: Sequence[float]
    """In nats, or in the unit of the user's own loss."""
    gradient_norms: Sequence[float]
    """L2 norm of all gradients."""
    data: int = 0
    """Checksum of the batches of all steps."""
    trained: Sequence[str] = ()
    """Parameters that the arm's optimizer steps, by the names that they have before a conversion."""
    movement: Mapping[str, Moved] = field(default_factory=dict)
    """By the same names."""
    first_products: Mapping[str, ProductCount] = field(default_factory=dict)
    """Phase of the step -> products of the first step; empty where it was not watched."""
    last_products: Mapping[str, ProductCount] = field(default_factory=dict)
    """The same of the last step."""

    @property
    def finite(self) -> bool:
        return all(math.isfinite(x) for x in (*self.losses, *self.gradient_norms))


@dataclass(frozen=True)
class LossEvidence:
    """Curves by seed: of the FP8 arm, of the reference, and of the reference with its weights moved by one rounding
    (``twin``), which shows how far two honest BF16 runs drift apart."""

    fp8: Mapping[int, Curve]
    bf16: Mapping[int, Curve]
    twin: Mapping[int, Curve]


def loss_looks(arms: PairArms, twin: bool) -> Iterator[LossEvidence]:
    """All curves so far: first of the case's own number of seeds, then with one seed more at each look.

    It ends at ``MAX_LOSS_SEEDS`` seeds, and at the first seed that no further one can mend: with other data in an arm,
    or with numbers that are not finite. ``twin``: whether the twin's curves are wanted too. Raises ``ArmError``.
    """
    curves: dict[str, dict[int, Curve]] = {"fp8": {}, "bf16": {}, "twin": {}}
    seed = 0
    while True:
        for _ in range(arms.case.seeds if seed == 0 else 1):
            new = _curves(arms, seed, twin)
            for arm, curve in new.items():
                curves[arm][seed] = curve
            seed += 1
            if not all(curve.finite for curve in new.values()) or len({curve.data for curve in new.values()}) > 1:
                yield _evidence(curves)
                return
        yield _evidence(curves)
        if seed >= MAX_LOSS_SEEDS:
            return


def _evidence(curves: Mapping[str, Mapping[int, Curve]]) -> LossEvidence:
    return LossEvidence(**{arm: dict(by_seed) for arm, by_seed in curves.items()})


def _curves(arms: PairArms, seed: int, twin: bool) -> dict[str, Curve]:
    wanted = {"seed": seed, "steps": arms.case.horizon}
    if arms.side_by_side:
        # Each keeps all its threads: the sums of a convolution depend on their number, and the time does not.
        with arms.fp8.asked("curve", **wanted) as answer:
            reference = _reference_curves(arms, wanted, twin)
            return {"fp8": from_plain(Curve, answer()), **reference}
    fp8 = from_plain(Curve, arms.fp8.request("curve", **wanted))
    return {"fp8": fp8, **_reference_curves(arms, wanted, twin)}


def _reference_curves(arms: PairArms, wanted: Mapping[str, Any], twin: bool) -> dict[str, Curve]:
    """What another case has asked of this reference is not asked again."""

    def ask(jitter: bool) -> Curve:
        return from_plain(Curve, arms.bf16.request("curve", jitter=jitter, **wanted))

    curves = {"bf16": arms.shared(f"curve {wanted['seed']}", lambda: ask(jitter=False))}
    if twin:
        curves["twin"] = arms.shared(f"twin {wanted['seed']}", lambda: ask(jitter=True))
    return curves
