"""Judges samples of executed products: by their gain and their SQNR beside what the recipe's casts give. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_fp8.case import Case
from pytest_fp8.casts import promised_casts
from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.questions.numerics.evidence import LATER, NumericsEvidence, ProductCheck
from pytest_fp8.questions.numerics.limits import HIGH_PRECISION_DB, PLAIN_DB, Limits
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD
from pytest_fp8.verdicts import Finding

FORMULAS = {FPROP: "x . W^T", RECOMPUTE: "x . W^T", DGRAD: "dy . W", WGRAD: "dy^T . x"}
ZEROS, NOT_FINITE, SCALE, TOKENS, UNRELATED, COARSE, STALE = (
    "it gives zeros",
    "it gives values that are not finite",
    "a wrong scale: what a tensor was multiplied by before the cast is not what divides the product, or is so large "
    "that values saturate",
    "a part of the product is missing: of the tokens, or of an operand's values, which underflow or saturate",
    "the values have nothing to do with this layer's operands: another layer's, transposed, permuted or stale ones",
    "operands are coarser than the recipe's: E5M2 where E4M3 was promised, or a scale that does not fit, so that "
    "values underflow or saturate, or a tensor that is kept from an earlier step",
    "something that is kept from an earlier step: weights, inputs or scales that are not renewed",
)
LEFT_OUT = (
    "some rows or columns of the result are zero and the others right: a tile at the edge that a kernel leaves out"
)
BIAS = "its output is off by one constant row: the bias is added twice or missing; the product itself is right"
ONE_ROW = 0.8
"""Share of an error that is the same in all rows, from which it is a bias: one over the number of rows where it is
noise."""
LOST_OF_UNRELATED = 0.2
"""A gain below it is no product of which a part is missing: four values in five would have to be."""

MANY_ZEROS = 0.01
"""A share of zeros that the recipe's own casts do not give: rows or values were left out."""


def judged_products(evidence: NumericsEvidence) -> list[ProductCheck]:
    """The products that can be judged: with values other than zero, of layers that only multiply input and weight."""
    return _judged(evidence.fp8.products, evidence.bf16.products)


def later_products(evidence: NumericsEvidence) -> list[ProductCheck]:
    """The same after training steps. A layer must only multiply in the reference's first step, too."""
    return _judged(evidence.fp8.later, [*evidence.bf16.products, *evidence.bf16.later])


def evaluated_products(evidence: NumericsEvidence) -> tuple[list[ProductCheck], list[ProductCheck]]:
    """Those of the evaluation with the first weights and of the later one, of layers that only multiply in the
    reference's first step and in its evaluations."""
    fp8, bf16 = evidence.fp8, evidence.bf16
    reference = [*bf16.products, *bf16.evaluated, *bf16.evaluated_later]
    return _judged(fp8.evaluated, reference), _judged(fp8.evaluated_later, reference)


def _judged(products: Sequence[ProductCheck], reference: Sequence[ProductCheck]) -> list[ProductCheck]:
    plain: dict[str, bool] = {}
    for product in reference:
        sound = not product.power or product.sqnr >= min(PLAIN_DB, product.own_sqnr)
        plain[product.layer] = plain.get(product.layer, True) and sound
    return [p for p in products if p.power and plain.get(p.layer, True)]


def distance(product: ProductCheck) -> float:
    """How far the product's SQNR is below that of the recipe's own casts, in dB."""
    return min(product.own_sqnr, HIGH_PRECISION_DB) - product.sqnr


def gain_error(product: ProductCheck) -> float:
    """The product's gain over that of the recipe's own casts, less one. Both are 0 where a row of padding is so large
    that the cast leaves nothing of the others."""
    if product.gain == product.own_gain:
        return 0.0
    return product.gain / product.own_gain - 1 if product.own_gain else product.gain - 1


def find_in_products(case: Case, evidence: NumericsEvidence, limits: Limits) -> Finding | None:
    """FAIL names the layer that is worst, its role, what it computed and what the recipe's casts give there."""
    return _find(case, judged_products(evidence), limits)


def find_in_later_products(case: Case, evidence: NumericsEvidence, limits: Limits) -> Finding | None:
    """The same of the step after training steps. Asked where the first step is right."""
    return _find(case, later_products(evidence), limits, LATER_STEP)


def find_in_evaluations(case: Case, evidence: NumericsEvidence, limits: Limits) -> Finding | None:
    """The same of evaluations. Asked where both watched steps are right."""
    first, later = evaluated_products(evidence)
    return _find(case, first, limits, EVALUATION) or _find(case, later, limits, LATER_EVALUATION)


@dataclass(frozen=True)
class _Look:
    """When products were looked at, in the words of a message."""

    when: str = ""
    beside: str = ""
    """What is right beside it."""
    where: str = ""
    """Where to compare by hand."""
    later: bool = False
    """Whether all was right before the training steps."""


FIRST_STEP = _Look()
LATER_STEP = _Look(f" after {LATER} training steps", "; right in the first step", f" in step {LATER}", later=True)
EVALUATION = _Look(
    " in an evaluation", "; right in the training step that was watched", " in eval mode, without gradients"
)
LATER_EVALUATION = _Look(
    f" in an evaluation after {LATER} training steps",
    "; right in the training steps that were watched",
    f" after {LATER} training steps, without replacing the parameter",
    later=True,
)


def _find(case: Case, products: Sequence[ProductCheck], limits: Limits, look: _Look = FIRST_STEP) -> Finding | None:
    wrong: dict[tuple[str, str], list[ProductCheck]] = defaultdict(list)
    for product in products:
        cause = _cause(product, limits)
        if cause:
            cause = _later_cause(product, cause) if look.later else cause
            wrong[product.role, cause].append(product)
    if not wrong:
        return None
    # What goes wrong forward reaches every gradient: it comes first.
    order = {FPROP: 0, RECOMPUTE: 1, DGRAD: 2, WGRAD: 3}
    (role, cause), found = min(wrong.items(), key=lambda item: (order[item[0][0]], -len(item[1])))
    worst = max(found, key=lambda p: distance(p) if math.isfinite(p.sqnr) else math.inf)
    others = [p.layer for p in found if p.layer != worst.layer]
    more = sorted({f"{other_role} of {some([p.layer for p in ps])}" for (other_role, _), ps in wrong.items()})
    in_fp8 = (FPROP if role == RECOMPUTE else role) in promised_casts(case.backend, case.recipe, case.full_options)
    casts = "the recipe's casts" if in_fp8 else "BF16, which the recipe keeps here,"
    return fail(
        UNCODED,
        f"{len({p.layer for p in found})} FP8 layer(s) compute a wrong {role} product" + look.when,
        expected=f"{role} = {FORMULAS[role]}: gain {worst.own_gain:.3f} +-{_gain_limit(worst, limits):.3f}, SQNR "
        f"within {limits.sqnr_within(worst.values):.1f} dB of the {worst.own_sqnr:.1f} dB that {casts} give on these "
        "tensors",
        seen=f"{worst.layer}, {role}: gain {worst.gain:.3f}, SQNR {worst.sqnr:.1f} dB, {worst.lost:.1%} of the values "
        f"zero that should not be"
        + look.beside
        + (f"; also {some(others)}" if others else "")
        + (f"; wrong products in all: {'; '.join(more)}" if len(wrong) > 1 else ""),
        cause=f"{role} of {worst.layer}: {cause}",
        next_step=f"compute {FORMULAS[role]} of {worst.layer} in float32 from the tensors that the layer gets"
        + look.where
        + ", and compare; then its scales with 448 (e4m3) or 57344 (e5m2) over the largest magnitude",
    )


def _later_cause(product: ProductCheck, cause: str) -> str:
    """What the cause is where the first step was right. What the last steps added to a weight is missing from a stale
    one, as tokens may be: only zeros tell the two apart."""
    if cause in (UNRELATED, COARSE):
        return STALE
    return f"{STALE}; or {TOKENS}" if cause == TOKENS and product.lost < MANY_ZEROS else cause


def _gain_limit(product: ProductCheck, limits: Limits) -> float:
    return limits.gain + 4 * product.gain_error


def _cause(product: ProductCheck, limits: Limits) -> str:
    """What is wrong with the product, or an empty string."""
    if not (math.isfinite(product.gain) and math.isfinite(product.sqnr)):
        return NOT_FINITE
    far = distance(product) > limits.sqnr_within(product.values)
    off = abs(gain_error(product)) > _gain_limit(product, limits)
    if not (far or off):
        return ""
    if product.lost > 0.99 or product.gain == 0:
        return ZEROS
    if product.role in (FPROP, RECOMPUTE) and product.constant > ONE_ROW:
        return BIAS
    gain = gain_error(product) + 1
    error = 10 ** (-product.sqnr / 10)
    noise = max(error - (1 - product.gain) ** 2, 1e-10)
    # The SQNR that is left once the values are divided by their gain.
    rest = 10 * math.log10(product.gain**2 / noise)
    if off and min(product.own_sqnr, HIGH_PRECISION_DB) - rest < limits.sqnr_within(product.values):
        return SCALE
    own_error = 10 ** (-min(product.own_sqnr, HIGH_PRECISION_DB) / 10)
    # Values that are left out take their share of the power with them; those that underflow are small ones.
    if not off and product.lost > MANY_ZEROS / 2 and error - own_error < 2 * product.lost:
        return LEFT_OUT
    if not off or gain > 1:
        return COARSE
    # |seen|^2 over |exact|^2: at most the gain where a part is missing, near 1 where other values are in its place.
    power = error + 2 * product.gain - 1
    missing = gain >= LOST_OF_UNRELATED and power < (1 + product.gain) / 2
    return TOKENS if missing else UNRELATED
