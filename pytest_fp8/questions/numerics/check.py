"""Does FP8 compute what it should, forward and backward? Operand formats, products and gradients, together. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pytest_fp8.case import Case
from pytest_fp8.codes import UNCODED
from pytest_fp8.errors import first_line
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.causes import cause_of
from pytest_fp8.questions.numerics.evidence import NumericsEvidence, ProductCheck
from pytest_fp8.questions.numerics.formats import find_in_formats
from pytest_fp8.questions.numerics.gradients import Difference, differences, find_apart, find_in_gradients, undecided
from pytest_fp8.questions.numerics.handed_on import find_in_handed_on, numbers_of
from pytest_fp8.questions.numerics.limits import HIGH_PRECISION_DB, UNDECIDED, Limits, later_limits_of, limits_of
from pytest_fp8.questions.numerics.products import (
    distance,
    evaluated_products,
    find_in_evaluations,
    find_in_later_products,
    find_in_products,
    gain_error,
    judged_products,
    later_products,
)
from pytest_fp8.verdicts import Decision, Finding, Verdict, passed

QUESTION = "numerics"


def check_numerics(case: Case, evidence: NumericsEvidence, layers: LayersEvidence) -> Decision:
    """FAIL names the first thing that is wrong: formats of operands, then each layer's products, then gradients and
    what the optimizer is given of them, then products after training steps and in evaluations."""
    limits, found = limits_of(case.backend, case.recipe), differences(evidence)
    numbers = _numbers(evidence, found, limits)
    finding = (
        _other_data(evidence)
        or _not_finite(evidence)
        or find_in_formats(case, layers)
        or find_in_products(case, evidence, limits)
        or find_apart(evidence)
        or find_in_gradients(case, found, limits, partial(cause_of, evidence, found, limits))
        or find_in_handed_on(evidence)
        or find_in_later_products(case, evidence, later_limits_of(case.backend, case.recipe))
        or find_in_evaluations(case, evidence, later_limits_of(case.backend, case.recipe))
        or _nothing(numbers, layers, judged_products(evidence))
        or undecided(found)
    )
    if finding is not None:
        return finding.answer(QUESTION, numbers)
    gradients = gradients_in_words(numbers)
    products = (
        f"{numbers['products']} products of {numbers['layers']} layers right (lowest SQNR {numbers['sqnr_db']:.1f} dB)"
        if numbers["products"]
        else "no layer's products can be seen by themselves"
    )
    said = products + (gradients and f", {gradients}") + _not_reduced(evidence) + _not_evaluated(evidence)
    return passed(said).answer(QUESTION, numbers)


def _not_reduced(evidence: NumericsEvidence) -> str:
    """What is to be said where each rank of both arms has gradients of its own."""
    if not (evidence.fp8.gradients.apart and evidence.bf16.gradients.apart):
        return ""
    return (
        "; gradients differ between the ranks in both arms, and their means were compared: unless the step or the "
        "optimizer reduces them later, the ranks train apart, which the loss question sees"
    )


def _not_evaluated(evidence: NumericsEvidence) -> str:
    """What is to be said of an FP8 arm that cannot be evaluated where BF16's can."""
    error = evidence.fp8.evaluation_error
    if not error or not evidence.bf16.evaluated:
        return ""
    return f"; in eval mode, under no_grad(), the FP8 arm alone raises {first_line(error)}"


def gradients_in_words(numbers: Mapping[str, Any]) -> str:
    """How far the gradients are off BF16's: most by their difference, sensitive ones by their gain."""
    parts = []
    if numbers["gradient_error"] is not None:
        parts.append(f"gradients within {numbers['gradient_error']:.1%} of BF16's")
    if numbers["by_gain"]:
        parts.append(f"{numbers['by_gain']} sensitive ones within a factor of 1 +-{numbers['gain_error']:.2f}")
    return ", ".join(parts) if numbers["gradients"] else "no gradient can be compared"


def _numbers(evidence: NumericsEvidence, found: Sequence[Difference], limits: Limits) -> dict[str, Any]:
    judged, later = judged_products(evidence), later_products(evidence)
    roles: dict[str, dict[str, float]] = {}
    # Without those that any small change moves, such as the bias of attention's keys, whose gradient is rounding alone.
    decided = [each.relative for each in found if each.limit(limits) < UNDECIDED]
    for product in judged:
        role = roles.setdefault(
            product.role, {"products": 0, "sqnr_db": 100.0, "distance_db": -100.0, "gain_error": 0.0}
        )
        role["products"] += 1
        role["sqnr_db"] = min(role["sqnr_db"], product.sqnr)
        role["distance_db"] = max(role["distance_db"], distance(product))
        role["gain_error"] = max(role["gain_error"], abs(gain_error(product)))
    return {
        "products": len(judged),
        "layers": len({product.layer for product in judged}),
        "later": len(later),
        "later_distance_db": max((distance(product) for product in later), default=None),
        "later_worst": _in_words(max(later, key=lambda product: abs(gain_error(product)))) if later else None,
        "later_gain_error": max((abs(gain_error(product)) for product in later), default=None),
        **numbers_of(evidence),
        "evaluated": sum(map(len, evaluated_products(evidence))),
        "roles": roles,
        "sqnr_db": min((product.sqnr for product in judged), default=None),
        "underflow": max((product.underflow for product in judged), default=0.0),
        "gradients": len(found),
        "gradient_error": max(decided, default=None),
        "by_gain": sum(each.by_gain(limits) for each in found),
        "gain_error": max((abs(each.gain - 1) for each in found if each.by_gain(limits)), default=None),
        "gradient_ratio": max((each.relative / each.moved for each in found if each.moved), default=None),
        "limits": {"sqnr_db": limits.sqnr_db, "gain": limits.gain, "gradients": limits.gradients},
        "losses": {"fp8": evidence.fp8.gradients.loss, "bf16": evidence.bf16.gradients.loss},
    }


def _in_words(product: ProductCheck) -> str:
    own = f"gain {product.own_gain:.4f} and {product.own_sqnr:.2f} dB"
    return f"{product.layer}, {product.role}: gain {product.gain:.4f} and {product.sqnr:.2f} dB, its casts {own}"


def _other_data(evidence: NumericsEvidence) -> Finding | None:
    mine, theirs = evidence.fp8.gradients.data, evidence.bf16.gradients.data
    if mine == theirs:
        return None
    return Finding(
        UNCODED,
        Verdict.INVALID,
        headline="the arms got different data, so their gradients cannot be compared",
        expected="the same batch in both arms",
        seen=f"fingerprints {theirs:08x} (BF16) and {mine:08x} (FP8)",
        cause="the batch depends on the arm, or on random numbers that torch's generators do not draw",
        next_step="make batch(step) give the same tensors for the same step in every process",
    )


def _not_finite(evidence: NumericsEvidence) -> Finding | None:
    loss = evidence.bf16.gradients.loss
    if math.isfinite(loss):
        return None
    return Finding(
        UNCODED,
        Verdict.INVALID,
        headline="the BF16 arm's loss is not finite, so its gradients say nothing",
        expected="a finite loss at the first weights",
        seen=f"{loss} in BF16, {evidence.fp8.gradients.loss} in FP8",
        cause="the loss, the data or the model gives it, with FP8 having no part in it",
        next_step="mend the loss or the data; FP8 cannot be judged on this",
    )


def _nothing(numbers: dict[str, Any], layers: LayersEvidence, judged: Sequence[ProductCheck]) -> Finding | None:
    """Equal gradients of arms without FP8 show nothing, nor do right products. Some layers' products cannot be seen by
    themselves, such as those of fused layers, and are seen in the profile. FP8 that the profile does not know, in a
    kernel of one's own, shows in products that are less exact than BF16's."""
    in_fp8 = any(product.kind == FP8 for product in layers.products)
    rounded = any(product.sqnr < HIGH_PRECISION_DB for product in judged)
    if rounded or (in_fp8 and (judged or numbers["gradients"])):
        return None
    return Finding(
        UNCODED,
        Verdict.NOT_EXERCISED,
        headline="no FP8 product to judge" + ("" if numbers["gradients"] else ", and no gradient to compare"),
        expected="matrix products in FP8",
        seen="none in the step that was watched"
        + (f"; {len(judged)} products of converted layers are as exact as BF16's" if judged else ""),
        cause="FP8 is off where the layers multiply: a precision context that is not around the forward pass, or a "
        "layer that falls back to high precision"
        if judged
        else "the conversion left all layers in high precision, or the step calls none of them",
        next_step="ask fp8_pair.assert_layers(), which names what was converted and what ran in FP8",
    )
