"""Does FP8 compute what it should, forward and backward? Operand formats, products and gradients, together. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.case import Case
from pytest_fp8.codes import C, D, N
from pytest_fp8.errors import first_line
from pytest_fp8.questions.findings import finding
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.evidence import NumericsEvidence, ProductCheck
from pytest_fp8.questions.numerics.gradients import (
    Difference,
    differences,
    find_apart,
    find_in_gradients,
    find_in_handed_on,
    too_sensitive,
)
from pytest_fp8.questions.numerics.limits import (
    HIGH_PRECISION_DB,
    LATER_DELAYED,
    UNDECIDED,
    Limits,
    later_limits_of,
    limits_of,
)
from pytest_fp8.questions.numerics.products import (
    LATER_LOOKS,
    find_in_formats,
    find_in_products,
    judged_products,
    scaled_by_the_past,
)
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "numerics"


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
    limits: Limits


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
        limits=limits,
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
