"""Judges executed products: formats of operands, gain and SQNR beside what the recipe's casts give. Pure.

The limits, of products and of gradients, come from the spread that healthy arms showed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pytest_fp8.case import Case
from pytest_fp8.casts import fast_accumulation, promised_casts
from pytest_fp8.codes import N
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import EVALUATION, FP8, Product
from pytest_fp8.questions.numerics.evidence import LATER, NumericsEvidence, ProductCheck
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, WGRAD, Role, library_of
from pytest_fp8.verdicts import Finding

HIGH_PRECISION_DB = 40.0
"""SQNR above which more says nothing: a BF16 product has 53 to 56 dB, an FP8 one 20 to 35."""
PLAIN_DB = 35.0
"""SQNR from which a layer of the reference counts as a product of its input and weight, and nothing else."""
LEAST_VALUES = 64
"""Values below which a parameter is not judged by itself: of a scalar's gradient, one draw says nothing of its
spread."""
UNDECIDED = 0.8
"""A relative difference at which a gradient of zeros would nearly pass. Where the limit is as large, the gain is
judged. Where moved weights change the gradient by as much, it is not judged."""
GAIN_OF_MOVED = 1.0
"""A sensitive gradient's gain may differ from 1 by this multiple of the difference that moved weights make."""


@dataclass(frozen=True)
class Limits:
    """What a sound product or gradient stays within."""

    sqnr_db: float
    """A product's SQNR below what the recipe's own casts give on the same operands."""
    gain: float
    """The product's gain against theirs, as a fraction."""
    gradients: float
    """A gradient's relative difference to BF16's, as a multiple of the difference that moved weights make; and its
    gain's difference to 1, where only the gain is judged and weights were moved in several ways."""

    def sqnr_within(self, values: int) -> float:
        """With few values the noise power is itself uncertain: three standard errors, 3 * 10/ln(10) * sqrt(2/n) dB."""
        return float(self.sqnr_db + 18.4 / max(values, 1) ** 0.5)


LEAST = Limits(sqnr_db=1.0, gain=0.01, gradients=3.0)
"""Limits are never narrower: another chip's and another release's kernels round in another order."""
UNMEASURED = Limits(sqnr_db=3.0, gain=0.02, gradients=4.0)
"""Of recipes without healthy arms in :func:`healthy_spread`. An e5m2 operand in place of an e4m3 one costs 4.5 dB."""
LATER_DELAYED = Limits(sqnr_db=12.0, gain=0.1, gradients=4.0)
"""Of products by scales of past steps: those of delayed scaling in a later step, and of a layer with scales of its
own in any step. About twice what is allowed where its scales have seen the batch."""
ALLOWANCE = 2.0
"""Limits are this many times the largest value that any healthy sample showed."""


@cache
def healthy_spread() -> dict[str, dict[str, float]]:
    """Library and recipe -> the largest value of each limit's quantity in healthy arms, and the number of samples.
    Written by ``python -m benchmarks.numerics table``, never by hand."""
    found: dict[str, dict[str, float]] = json.loads(Path(__file__).with_name("spread.json").read_text())
    return found


def limits_of(backend: str, recipe: str) -> Limits:
    """The recipe's limits. Each value is the larger of :data:`LEAST` and twice the largest in healthy arms."""
    seen = healthy_spread().get(f"{library_of(backend)} {recipe}")
    if seen is None:
        return UNMEASURED
    return Limits(
        sqnr_db=max(LEAST.sqnr_db, ALLOWANCE * seen["sqnr_db"]),
        gain=max(LEAST.gain, ALLOWANCE * seen["gain"]),
        gradients=max(LEAST.gradients, ALLOWANCE * seen["gradients"]),
    )


def later_limits_of(backend: str, recipe: str) -> Limits:
    """Of products after training steps. Every recipe but delayed scaling takes its scales from the tensors that are
    multiplied, so that its products are as right in any step (111 sound workloads: 0.25 dB, 0.1 %)."""
    return LATER_DELAYED if recipe == "delayed" else limits_of(backend, recipe)


# -- each product by itself -------------------------------------------------------------------------------------------

FORMULAS = {FPROP: "x . W^T", RECOMPUTE: "x . W^T", DGRAD: "dy . W", WGRAD: "dy^T . x"}
THE_BIAS = 0.8
"""Share of an error that a bias explains, missing or added twice, from which it is the bias."""
A_SMALL_BIAS = 0.3
"""The same where the rest of the error is what the recipe's casts give: a bias as small as FP8's own noise."""
LOST_OF_UNRELATED = 0.2
"""A gain below it is no product of which a part is missing: four values in five would have to be."""

MANY_ZEROS = 0.005
"""A share of zeros that the recipe's own casts do not give: rows or values were left out."""
MOST_ZEROS = 0.5
"""More of them than values of another layout leave: of dead units and others, a quarter at most."""


class Look(NamedTuple):
    """When products were looked at."""

    products: str
    """The field of :class:`ArmNumerics` that holds them."""
    reference: Sequence[str]
    """Those in which a layer of the reference must only multiply input and weight."""
    when: str = ""
    later: bool = False
    """After training steps; all was right before them."""


FIRST = Look("products", ["products"])
AFTER_STEPS = Look("later", ["products", "later"], f" after {LATER} training steps", later=True)
EVALUATIONS = ["products", "evaluated", "evaluated_later"]
LATER_LOOKS = (
    AFTER_STEPS,
    Look("evaluated", EVALUATIONS, " in an evaluation"),
    Look("evaluated_later", EVALUATIONS, f" in an evaluation{AFTER_STEPS.when}", later=True),
)


def judged_products(evidence: NumericsEvidence, look: Look = FIRST) -> list[ProductCheck]:
    """The products that can be judged: with values other than zero, of layers that only multiply input and weight."""
    plain: dict[str, bool] = {}
    for product in (each for field in look.reference for each in getattr(evidence.bf16, field)):
        sound = not product.power or product.sqnr >= min(PLAIN_DB, product.own_sqnr)
        plain[product.layer] = plain.get(product.layer, True) and sound
    return [p for p in getattr(evidence.fp8, look.products) if p.power and plain.get(p.layer, True)]


def distance(product: ProductCheck) -> float:
    """How far the product's SQNR is below that of the recipe's own casts, in dB."""
    return min(product.own_sqnr, HIGH_PRECISION_DB) - product.sqnr


def gain_error(product: ProductCheck) -> float:
    """The product's gain over that of the recipe's own casts, less one. Both are 0 where a row of padding is so large
    that the cast leaves nothing of the others."""
    if product.gain == product.own_gain:
        return 0.0
    return product.gain / product.own_gain - 1 if product.own_gain else product.gain - 1


def scaled_by_the_past(evidence: NumericsEvidence) -> set[str]:
    """Layers with scales of their own that are renewed from step to step. The casts that their products are compared
    with take scales from the tensors themselves, or others that the library keeps."""
    return {product.layer for product in (*evidence.fp8.products, *evidence.fp8.later) if product.own_scales}


def find_in_products(case: Case, evidence: NumericsEvidence, limits: Limits, look: Look = FIRST) -> Finding | None:
    """FAIL names the layer that is worst, its role, what it computed and what the recipe's casts give there."""
    past = scaled_by_the_past(evidence)
    wrong: dict[tuple[str, N], list[ProductCheck]] = defaultdict(list)
    for product in judged_products(evidence, look):
        code = _code(product, _limits(product, limits, past))
        # What the last steps added to a weight is missing from a stale one, as tokens may be: only zeros tell these
        # apart.
        kept = code in (N.UNRELATED, N.TOO_COARSE) or (code is N.PART_MISSING and product.lost < MANY_ZEROS)
        if code:
            wrong[product.role, N.STALE if look.later and kept else code].append(product)
    if not wrong:
        return None
    # What goes wrong forward reaches every gradient: it comes first.
    order = {FPROP: 0, RECOMPUTE: 1, DGRAD: 2, WGRAD: 3}
    (role, code), found = min(wrong.items(), key=lambda item: (order[item[0][0]], -len(item[1])))
    worst = max(found, key=lambda p: distance(p) if math.isfinite(p.sqnr) else math.inf)
    others = [p.layer for p in found if p.layer != worst.layer]
    more = sorted({f"{other_role} of {some([p.layer for p in ps])}" for (other_role, _), ps in wrong.items()})
    limits = _limits(worst, limits, past)
    in_fp8 = (FPROP if role == RECOMPUTE else role) in promised_casts(case.backend, case.recipe, case.full_options)
    casts = "the recipe's casts" if in_fp8 else "BF16, which the recipe keeps here,"
    return finding(
        code,
        f"{role} = {FORMULAS[role]}: gain {worst.own_gain:.3f} +-{_gain_limit(worst, limits):.3f}, SQNR within "
        f"{limits.sqnr_within(worst.values):.1f} dB of the {worst.own_sqnr:.1f} dB that {casts} give on these tensors",
        f"{role} of {worst.layer}: gain {worst.gain:.3f}, SQNR {worst.sqnr:.1f} dB, {worst.lost:.1%} of the values "
        "zero that should not be"
        + (f"; also {some(others)}" if others else "")
        + (f"; wrong products in all: {'; '.join(more)}" if len(wrong) > 1 else "")
        + ("; what was looked at before is right" if look.when else ""),
        about=worst.layer,
        count=len({p.layer for p in found}),
        role=role,
        when=look.when,
    )


def _limits(product: ProductCheck, limits: Limits, past: Collection[str]) -> Limits:
    return LATER_DELAYED if product.layer in past else limits


def _gain_limit(product: ProductCheck, limits: Limits) -> float:
    return limits.gain + 4 * product.gain_error


def _code(product: ProductCheck, limits: Limits) -> N | None:
    """What is wrong with the product."""
    if not (math.isfinite(product.gain) and math.isfinite(product.sqnr)):
        return N.NOT_FINITE
    within = limits.sqnr_within(product.values)
    far = distance(product) > within
    off = abs(gain_error(product)) > _gain_limit(product, limits)
    if not (far or off):
        return None
    if product.lost > MOST_ZEROS or product.gain == 0:
        return N.PART_MISSING
    error = 10 ** (-product.sqnr / 10)
    own_error = 10 ** (-min(product.own_sqnr, HIGH_PRECISION_DB) / 10)
    sound = error * (1 - product.of_bias) <= own_error * 10 ** (within / 10)
    if product.role in (FPROP, RECOMPUTE) and product.of_bias > (A_SMALL_BIAS if sound else THE_BIAS):
        return N.WRONG_BIAS
    gain = gain_error(product) + 1
    noise = max(error - (1 - product.gain) ** 2, 1e-10)
    # The SQNR that is left once the values are divided by their gain.
    rest = 10 * math.log10(product.gain**2 / noise)
    if off and min(product.own_sqnr, HIGH_PRECISION_DB) - rest < within:
        return N.WRONG_SCALE
    # Values that are left out take their share of the power with them; those that underflow are small ones.
    if not off and product.lost > MANY_ZEROS and error - own_error < 2 * product.lost:
        return N.PART_MISSING
    if not off or gain > 1:
        return N.TOO_COARSE
    # |seen|^2 over |exact|^2: at most the gain where a part is missing, near 1 where other values are in its place.
    power = error + 2 * product.gain - 1
    missing = gain >= LOST_OF_UNRELATED and power < (1 + product.gain) / 2
    return N.PART_MISSING if missing else N.UNRELATED


# -- formats of operands ----------------------------------------------------------------------------------------------

ROLES_OF = {"forward": (FPROP,), RECOMPUTE: (FPROP,), "backward": (DGRAD, WGRAD)}
"""Phase -> the roles whose products it holds. Both of the backward pass have the same formats in every recipe."""


def find_in_formats(case: Case, layers: LayersEvidence) -> Finding | None:
    """FAIL where an operand has another FP8 format than the recipe promises, or a product another accumulation. Not
    judged where no layer of the library is: the recipe of FP8 of the user's own cannot be read."""
    if not layers.live_fp8:
        return None
    usual = promised_casts(case.backend, case.recipe, case.full_options)
    # Of layers by another recipe of the library: products of their sizes may have its formats.
    others = layers.other_recipes(case)
    of_size = {
        call.expected(role): promised_casts(case.backend, others[call.name], {})
        for call in layers.calls
        for role in (call.owed if call.name in others else ())
    }
    fast = fast_accumulation(case.backend, case.recipe)
    # Where no hook runs, as in compiled code, recomputed products lie in the backward phase.
    recomputed = {call.expected(RECOMPUTE) for call in layers.calls if RECOMPUTE in call.owed}
    ran = [p for p in layers.verified() if p.kind == FP8 and p.phase not in (EVALUATION, "optimizer")]

    def roles(product: Product) -> tuple[Role, ...]:
        again = product.phase == "backward" and product.extents in recomputed
        return (*ROLES_OF[product.phase], *((FPROP,) if again else ()))

    for phase in ROLES_OF:
        mine = [p for p in ran if p.phase == phase]
        promised = {
            p: {
                tuple(sorted(cast.format for cast in casts[role]))
                for casts in (usual, of_size.get(p.extents, {}))
                for role in roles(p)
                if role in casts
            }
            for p in mine
        }
        wrong = [p for p in mine if p.formats and promised[p] and tuple(sorted(p.formats)) not in promised[p]]
        if wrong:
            seen = " x ".join(sorted(wrong[0].formats))
            wanted = " or ".join(" x ".join(pair) for pair in sorted(promised[wrong[0]]))
            said = f"{seen} in {len(wrong)} of {len(mine)} products, of the size of {_names(wrong, layers)}"
            return finding(N.OTHER_FORMAT, wanted, said, count=len(wrong), phase=phase)
        wrong = [p for p in mine if p.fast_accumulation and not set(fast) & set(roles(p))]
        if wrong:
            expected = "sums in float32: this recipe asks for fast accumulation in the forward pass at most"
            said = f"{len(wrong)} of {len(mine)} products, of the size of {_names(wrong, layers)}"
            return finding(N.FAST_ACCUMULATION, expected, said, count=len(wrong), phase=phase)
    return None


def _names(products: list[Product], layers: LayersEvidence) -> str:
    sizes = [{p.inner, *p.outer} for p in products]
    return some([n for n, pair in layers.originals.items() if any(set(pair) <= size for size in sizes)]) or "no layer"
