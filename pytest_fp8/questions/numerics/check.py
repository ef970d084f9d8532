"""Does FP8 compute what it should, forward and backward? Operand formats, products and gradients, together. Pure.

The arms' gradients are compared by their sketches, parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_fp8.case import Case
from pytest_fp8.codes import C, Code, D, N
from pytest_fp8.errors import first_line
from pytest_fp8.plain import from_plain, of_text
from pytest_fp8.plan import REFERENCE, Ask, Asking
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.evidence import LATER, Gradients, HandedOn, NumericsEvidence, ProductCheck
from pytest_fp8.questions.numerics.products import (
    GAIN_OF_MOVED,
    HIGH_PRECISION_DB,
    LATER_DELAYED,
    LATER_LOOKS,
    LEAST_VALUES,
    UNDECIDED,
    Limits,
    find_in_formats,
    find_in_products,
    judged_products,
    later_limits_of,
    limits_of,
    scaled_by_the_past,
)
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vectors = dict[str, NDArray[Any]]
    """Parameter -> its gradient's sketch."""

QUESTION = "numerics"
DRAWS = 8
"""Further ways in which weights are moved. A router sends a row another way in some of them."""
OPERANDS = 4
"""Further ways in which what Linears are given is moved instead, each value on its own, as FP8 rounds it. Gradients
that cancel between rows still cancel beside moved weights."""
LEAST_GAIN, LEAST_FACTOR = 0.02, 0.1
"""A gain below the one is no factor but nothing that arrives; one nearer to 1 than the other explains no difference
that fails."""
MANY_LOST = 0.2
"""Share of an operand's values that the recipe's own casts make 0, from which that is the cause."""


@dataclass(frozen=True)
class NumericsFigures(Figures):
    """``sqnr_db``, ``gradient_error``, ``gain_error``: of the worst product or gradient; ``None`` where there is
    none."""

    products: int
    layers: int
    sqnr_db: float | None
    gradients: int
    not_judged: int
    gradient_error: float | None
    gradient_limit: float | None
    """Of that gradient: each has one of its own."""
    by_gain: int
    gain_error: float | None


def check_numerics(case: Case, evidence: NumericsEvidence, layers: LayersEvidence) -> Decision:
    """FAIL names the first thing that is wrong: formats of operands, then each layer's products, what the optimizer
    is given of them, gradients, then products after training steps and in evaluations."""
    limits, found = limits_of(case.backend, case.recipe), differences(evidence)
    later_limits = later_limits_of(case.backend, case.recipe)
    figures = _figures(evidence, found, limits)
    finding = (
        _not_comparable(evidence)
        or find_in_formats(case, layers)
        or find_in_products(case, evidence, limits)
        or find_apart(evidence)
        or find_in_handed_on(evidence)
        or find_in_gradients(case, evidence, found, limits)
        or next(filter(None, (find_in_products(case, evidence, later_limits, look) for look in LATER_LOOKS)), None)
        or _nothing(figures, layers, judged_products(evidence))
        or too_sensitive(found)
        or passed(_said(figures, evidence, layers))
    )
    return finding.answer(QUESTION, figures)


def _said(figures: NumericsFigures, evidence: NumericsEvidence, layers: LayersEvidence) -> str:
    """What was compared, how near it came, and what was not judged or by wider limits."""
    parts = ["no layer's products can be seen by themselves"]
    if figures.products:
        lowest = f"lowest SQNR {figures.sqnr_db:.1f} dB"
        parts = [f"{figures.products} products of {figures.layers} layers right ({lowest})"]
    if own_scales := scaled_by_the_past(evidence) & {product.layer for product in judged_products(evidence)}:
        wider = f"within {LATER_DELAYED.sqnr_db:.0f} dB and {LATER_DELAYED.gain:.0%}"
        parts.append(f"those of {len(own_scales)} layer(s) with scales of past steps {wider}")
    if figures.gradient_error is not None:
        parts.append(f"gradients within {figures.gradient_error:.1%} of BF16's")
    if figures.by_gain:
        parts.append(f"{figures.by_gain} sensitive ones within a factor of 1 +-{figures.gain_error:.2f}")
    if figures.not_judged:
        most = f"moved weights change them by {UNDECIDED:.0%} and more"
        parts.append(f"{figures.not_judged} of {figures.gradients} not judged ({most})")
    if not figures.gradients:
        parts.append("no gradient can be compared")
    said = ", ".join(parts)
    if not layers.live_fp8:
        said += "; operands' formats were not judged: no FP8 layer says which recipe it follows"
    if evidence.fp8.gradients.apart and evidence.bf16.gradients.apart:
        said += (
            "; gradients differ between the ranks in both arms, and their means were compared: unless the step or the "
            "optimizer reduces them later, the ranks train apart, which the loss question sees"
        )
    if evidence.fp8.evaluation_error and evidence.bf16.evaluated:
        error = first_line(evidence.fp8.evaluation_error)
        said += f"; in eval mode, under no_grad(), the FP8 arm alone raises {error}"
    return said


def _figures(evidence: NumericsEvidence, found: Sequence[Difference], limits: Limits) -> NumericsFigures:
    judged = judged_products(evidence)
    # Without those that any small change moves, such as the bias of attention's keys, whose gradient is rounding alone.
    decided = [each for each in found if each.limit(limits) < UNDECIDED]
    furthest = max(decided, key=lambda each: each.relative, default=None)
    by_gain = [abs(each.gain - 1) for each in found if each.by_gain(limits)]
    return NumericsFigures(
        products=len(judged),
        layers=len({product.layer for product in judged}),
        sqnr_db=min((product.sqnr for product in judged), default=None),
        gradients=len(found),
        not_judged=sum(not each.judged for each in found),
        gradient_error=furthest.relative if furthest else None,
        gradient_limit=furthest.limit(limits) if furthest else None,
        by_gain=len(by_gain),
        gain_error=max(by_gain, default=None),
    )


def _not_comparable(evidence: NumericsEvidence) -> Finding | None:
    mine, theirs = evidence.fp8.gradients, evidence.bf16.gradients
    if mine.data != theirs.data:
        seen = f"fingerprints {theirs.data:08x} (BF16) and {mine.data:08x} (FP8)"
        return finding(D.OTHER_DATA, "the same batch in both arms", seen, Verdict.INVALID)
    if math.isfinite(theirs.loss):
        return None
    seen, when = f"{theirs.loss} in BF16, {mine.loss} in FP8", " at the first weights, so its gradients say nothing"
    return finding(C.REFERENCE_NOT_FINITE, "a finite loss", seen, Verdict.INVALID, what="loss", when=when)


def _nothing(figures: NumericsFigures, layers: LayersEvidence, judged: Sequence[ProductCheck]) -> Finding | None:
    """Equal gradients of arms without FP8 show nothing, nor do right products. Some layers' products cannot be seen by
    themselves, such as those of fused layers, and are seen in the profile. FP8 that the profile does not know, in a
    kernel of one's own, shows in products that are less exact than BF16's."""
    in_fp8 = any(product.kind == FP8 for product in layers.products)
    rounded = any(product.sqnr < HIGH_PRECISION_DB for product in judged)
    if rounded or (in_fp8 and (judged or figures.gradients)):
        return None
    exact = f"; {len(judged)} products of converted layers are as exact as BF16's" if judged else ""
    seen = f"none in the step that was watched{exact}" + ("" if figures.gradients else "; no gradient to compare")
    return finding(N.NO_FP8_PRODUCT, "matrix products in FP8", seen, Verdict.NOT_EXERCISED)


# -- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The gradient of one parameter in the FP8 arm, against the reference's."""

    parameter: str
    relative: float
    """|FP8 - BF16| / |BF16|."""
    gain: float
    """<FP8, BF16> / |BF16|^2."""
    cosine: float
    moved: float
    """|moved - BF16| / |BF16|: what weights that are moved as much as FP8 moves products do to it. The largest of all
    ways in which they were moved."""
    moved_gain: float = 0.0
    """The largest difference of a moved gradient's gain to 1; 0 where weights were moved in one way only."""

    def limit(self, limits: Limits) -> float:
        """Of the relative difference."""
        return limits.gradients * self.moved

    def gain_limit(self, limits: Limits) -> float:
        """Of the gain's difference to 1, where the gain is what is judged."""
        return max(GAIN_OF_MOVED * self.moved, limits.gradients * self.moved_gain)

    @property
    def rest(self) -> float:
        """The relative difference that is left once the gradient is divided by its gain."""
        if not self.gain:
            return math.inf
        noise = self.relative**2 - (1 - self.gain) ** 2
        return math.sqrt(max(noise, 0.0)) / abs(self.gain)

    @property
    def judged(self) -> bool:
        """Whether any limit tells a wrong gradient from what moved weights make of it. One that is not finite is
        wrong beside any that is."""
        return self.moved < UNDECIDED or (math.isfinite(self.moved) and not math.isfinite(self.relative))

    def by_gain(self, limits: Limits) -> bool:
        """Whether the gradient is so sensitive that only its gain tells a wrong one."""
        return self.moved < UNDECIDED <= self.limit(limits)

    def wrong(self, limits: Limits) -> bool:
        """Not "more than the limit": a gradient that is not finite is within no limit."""
        if self.by_gain(limits):
            return not abs(self.gain - 1) <= self.gain_limit(limits)
        return self.judged and not self.relative <= self.limit(limits)

    def expected(self, limits: Limits) -> str:
        if self.by_gain(limits):
            return f"1 +-{self.gain_limit(limits):.2f} times BF16's gradient of {self.parameter}"
        return f"at most {self.limit(limits):.1%} from BF16's gradient of {self.parameter}"


def differences(evidence: NumericsEvidence) -> list[Difference]:
    """Of each parameter with a gradient in the reference, in the order of the backward pass."""
    import numpy as np

    texts = (arm.sketches for arm in (evidence.bf16.gradients, evidence.fp8.gradients, *evidence.moved))
    arms = [{name: np.array(of_text(text), dtype=np.float64) for name, text in arm.items()} for arm in texts]
    reference, mine, first, *further = arms
    with np.errstate(invalid="ignore", over="ignore"):
        found: list[Difference] = []
        for name, bf16 in reference.items():
            fp8, moved = mine.get(name), first.get(name)
            if fp8 is None and name in evidence.fp8.gradients.silent:
                fp8 = np.zeros_like(bf16)
            length = float(np.linalg.norm(bf16))
            if fp8 is None or moved is None or not length or np.count_nonzero(bf16) < LEAST_VALUES:
                continue
            own = float(np.linalg.norm(fp8))
            relative, gain = _apart(fp8, bf16)
            cosine = gain * length / own if own else 0.0
            found.append(Difference(name, relative, gain, cosine, _apart(moved, bf16)[0]))
        # Of one draw: a parameter that it happened to move little is taken to move half as much as others.
        middle = float(np.median([each.moved for each in found])) if found else 0.0
        return [_widened(d, middle / 2, reference, further) if math.isfinite(d.moved) else d for d in found]


def find_apart(evidence: NumericsEvidence) -> Finding | None:
    """Ranks with gradients of their own in one arm alone. In both arms they may be reduced later, and the loss question
    looks at the weights."""
    fp8, bf16 = evidence.fp8.gradients.apart, evidence.bf16.gradients.apart
    if bool(fp8) == bool(bf16):
        return None
    arm, other = ("FP8", "BF16") if fp8 else ("BF16", "FP8")
    expected = f"after the backward pass the same gradients on every rank, as in the {other} arm"
    return finding(D.NOT_REDUCED, expected, fp8 or bf16, Verdict.FAIL if fp8 else Verdict.INVALID, arm=arm)


def _widened(d: Difference, least: float, reference: Vectors, further: Sequence[Vectors]) -> Difference:
    """The difference with the largest of what all ways of moving weights do, and at least ``least``."""
    more = [_apart(moved[d.parameter], reference[d.parameter]) for moved in further if d.parameter in moved]
    sizes = [relative for relative, _ in more if math.isfinite(relative)]
    gains = [abs(gain - 1) for _, gain in more if math.isfinite(gain)]
    return replace(d, moved=max(d.moved, least, *sizes), moved_gain=max(gains, default=0.0))


def _apart(moved: NDArray[Any], bf16: NDArray[Any]) -> tuple[float, float]:
    """(|moved - BF16| / |BF16|, <moved, BF16> / |BF16|^2)."""
    import numpy as np

    square = float(bf16 @ bf16)
    return float(np.linalg.norm(moved - bf16)) / math.sqrt(square), float(moved @ bf16) / square


def too_sensitive(found: Sequence[Difference]) -> Finding | None:
    """INCONCLUSIVE where most gradients are rounding noise: no limit would tell a wrong one."""
    open_ones = [d for d in found if not d.judged]
    if 2 * len(open_ones) <= len(found):
        return None
    limit = f"gradients that move by less than {UNDECIDED:.0%} where weights are moved as much as FP8 moves products"
    seen = some([f"{d.parameter} {d.moved:.0%}" for d in open_ones])
    return finding(N.TOO_SENSITIVE, limit, seen, Verdict.INCONCLUSIVE, count=len(open_ones), of=len(found))


def with_further_draws(case: Case, evidence: NumericsEvidence) -> Asking[NumericsEvidence]:
    """The evidence with ``further`` where a gradient looks wrong. Sound arms of most models have none, and their
    reference is not asked."""
    limits = limits_of(case.backend, case.recipe)
    if not any(difference.wrong(limits) for difference in differences(evidence)):
        return evidence
    found = yield Ask(REFERENCE, "moved", of="gradients", draws=DRAWS, operands=OPERANDS)
    return replace(evidence, further=[from_plain(Gradients, each) for each in found])


def find_in_gradients(
    case: Case, evidence: NumericsEvidence, found: Sequence[Difference], limits: Limits
) -> Finding | None:
    """FAIL names the first wrong gradient of the backward pass: where the error begins."""
    wrong = [d for d in found if d.wrong(limits)]
    if not wrong:
        return None
    first, index = wrong[0], found.index(wrong[0])
    before = f"the last right one in backward order is {found[index - 1].parameter}'s" if index else "it is the first"
    code, given = _cause(evidence, limits, wrong)
    why = finding(
        code,
        f"{first.expected(limits)} at the same weights and batch: weights that are moved as much as FP8 moves "
        f"products change it by {first.moved:.1%}",
        f"{first.parameter}: {first.gain:.2f} times BF16's, {first.relative:.1%} off, cosine {first.cosine:.3f}; "
        f"{before}" + (f"; also {some([d.parameter for d in wrong[1:]])}" if len(wrong) > 1 else ""),
        about=first.parameter,
        count=len(wrong),
        of=len(found),
        **given,
    )
    if not case.compile or case.emulated:
        return why
    compiled = "The layers' products are right when run uncompiled: ask again with `compile=False` in the mark."
    return replace(why, next_step=f"{why.next_step} {compiled}")


def _cause(evidence: NumericsEvidence, limits: Limits, wrong: Sequence[Difference]) -> tuple[Code, dict[str, Any]]:
    """What the evidence of the same step says of it, most telling first; and what the words leave open."""
    first = wrong[0]
    if evidence.fp8.gradients.random != evidence.bf16.gradients.random:
        return D.OTHER_RANDOM_NUMBERS, {}
    if all(d.parameter.rpartition(".")[2] == "bias" for d in wrong):
        # What the backward pass hands on and multiplies is right.
        return N.BIAS_GRADIENT, {}
    if abs(first.gain) >= LEAST_GAIN and abs(first.gain - 1) > LEAST_FACTOR and first.rest <= first.limit(limits):
        return N.GRADIENT_TIMES, {"factor": first.gain}
    worst = max(evidence.fp8.products, key=lambda product: product.underflow, default=None)
    if worst is not None and worst.underflow >= MANY_LOST:
        return N.OUTLIER, {"underflow": worst.underflow, "where": f"{worst.role} of {worst.layer}"}
    return N.OTHER_GRADIENT, {}


# -- what optimizers are given ----------------------------------------------------------------------------------------

SAME = 0.999
"""Cosine from which the reference's optimizer is given what the products gave, times a factor."""
ANOTHER = 0.98
"""Cosine below which an FP8 layer's is something else: docs/limits.md."""
COMMON = 0.005
"""The reference's factors lie this close together where one is common to all layers: clipping by the whole norm."""
FACTOR = 0.02
"""An FP8 layer's factor may differ from the common one by this."""
LEAST_LAYERS = 3
"""To tell one layer's factor from that of all."""


Pairs = list[tuple[HandedOn, HandedOn]]
"""Of one layer and call of ``optimizer.step()``, in the FP8 arm and in the reference."""


def find_in_handed_on(evidence: NumericsEvidence) -> Finding | None:
    """FAIL names the layers whose weight gradients something changes in the FP8 arm alone, between the backward pass
    and ``optimizer.step()``."""
    first = _find(evidence.fp8.handed_on, evidence.bf16.handed_on, "")
    return first or _find(evidence.fp8.handed_on_later, evidence.bf16.handed_on_later, f" after {LATER} training steps")


def _find(mine: Sequence[HandedOn], reference: Sequence[HandedOn], when: str) -> Finding | None:
    """Of layers that have as many in both arms, where the reference's optimizer is given what the products gave."""
    pairs: Pairs = []
    for layer in dict.fromkeys(each.layer for each in mine):
        own, other = ([each for each in arm if each.layer == layer] for arm in (mine, reference))
        if len(own) == len(other):
            pairs += [both for both in zip(own, other, strict=True) if both[1].cosine >= SAME]
    others = sorted((pair for pair in pairs if not pair[0].cosine >= ANOTHER), key=lambda pair: pair[0].cosine)
    found = others or _scaled(pairs)
    if not found:
        return None
    worst, beside = found[0]
    middle = median(each.factor for each, _ in pairs)
    seen = f"times {worst.factor:.3f}, of the other layers {middle:.3f}"
    seen = f"cosine {worst.cosine:.3f}, BF16's {beside.cosine:.3f}" if others else seen
    also = [each.layer for each, _ in found if each.layer != worst.layer]
    return finding(
        N.GRADIENT_REPLACED if others else N.GRADIENT_SCALED,
        "the sum of dy^T . x over the step's calls, times one factor for all layers, as in BF16",
        f"{worst.layer}: {seen}" + (f"; also {some(also)}" if also else ""),
        count=len(found),
        when=when,
    )


def _scaled(pairs: Pairs) -> Pairs:
    common = median(reference.factor for _, reference in pairs) if len(pairs) >= LEAST_LAYERS else 0.0
    if not common or any(abs(reference.factor / common - 1) > COMMON for _, reference in pairs):
        return []
    middle = median(mine.factor for mine, _ in pairs)
    # Clipping by each layer's norm, or each group's, that BF16 stays below: no factor is smaller than the norms' own.
    clipped = min(reference.length / mine.length for mine, reference in pairs) * (1 - FACTOR)
    off = [(pair, pair[0].factor / middle if middle else 0.0) for pair in pairs]
    return [pair for pair, factor in off if not (abs(factor - 1) <= FACTOR or clipped <= factor < 1)]
