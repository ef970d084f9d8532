"""What the page shows of one case beside its answers: taken from what its arms have already answered."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_fp8.questions.asks import fp8_layers, numerics_of
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.numerics.check import differences, with_further_draws
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.products import limits_of
from pytest_fp8.recipes import recipe_facts
from pytest_fp8.report.rows import Curve, Evidence

if TYPE_CHECKING:
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.case import Case
    from pytest_fp8.plan import Begin
    from pytest_fp8.questions.loss.evidence import LossEvidence

GRADIENT, STAYS = "gradient off BF16 (limit)", "stays in BF16"
"""Columns beside those of the roles."""


def evidence_of(arms: PairArms, curves: Begin[LossEvidence]) -> Evidence:
    """Curves and layers as far as they are known. Asks no arm."""
    case, loss = arms.case, arms.known(curves)
    layers, numerics = arms.known(fp8_layers), arms.known(numerics_of)
    if numerics is not None:
        first = numerics
        numerics = arms.known(lambda: with_further_draws(case, first)) or first
    return Evidence(curves_of(loss) if loss is not None else (), layers_of(case, layers, numerics))


def curves_of(evidence: LossEvidence) -> list[Curve]:
    return [
        Curve(seed, list(evidence.bf16[seed].losses), list(curve.losses))
        for seed, curve in sorted(evidence.fp8.items())
        if seed in evidence.bf16
    ]


def layers_of(
    case: Case, layers: LayersEvidence | None, numerics: NumericsEvidence | None
) -> dict[str, dict[str, str]]:
    """Each Linear of the unconverted model, in the model's order, and what was compared besides: for each role the kind
    of its product, its SQNR, and in brackets that of the recipe's own casts; how far its weight's gradient is off
    BF16's, beside its limit; why it stays in BF16."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    if layers is not None:
        for name in layers.originals:
            found[name] |= {STAYS: str(layers.skipped[name])} if name in layers.skipped else {}
        for each in layers.step(recipe_facts(case.backend, case.recipe).roles).attributions:
            if each.layer in layers.originals:
                found[each.layer][each.role] = each.kind
    if numerics is not None:
        limits, kinds = limits_of(case.backend, case.recipe), {name: dict(cells) for name, cells in found.items()}
        for product in numerics.fp8.products:
            if product.power:
                kind = kinds.get(product.layer, {}).get(product.role, "")
                text = f"{kind} {product.sqnr:.3g} dB ({product.own_sqnr:.3g})"
                found[product.layer][product.role] = text.strip()
        for gradient in differences(numerics):
            limit = f" (<{gradient.limit(limits):.3g})" if gradient.judged else ""
            found[gradient.parameter.removesuffix(".weight")][GRADIENT] = f"{gradient.relative:.3g}{limit}"
    return found
