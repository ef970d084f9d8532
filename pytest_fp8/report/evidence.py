"""What the page shows of one case beside its answers: taken from what its arms have already answered."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_fp8.questions.asks import fp8_layers, numerics_of
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.gradients import differences, with_further_draws
from pytest_fp8.questions.numerics.limits import limits_of
from pytest_fp8.recipes import recipe_facts
from pytest_fp8.report.rows import Curve, Evidence, LayerShown

if TYPE_CHECKING:
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.case import Case
    from pytest_fp8.plan import Begin
    from pytest_fp8.questions.loss.evidence import LossEvidence


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


def layers_of(case: Case, layers: LayersEvidence | None, numerics: NumericsEvidence | None) -> list[LayerShown]:
    """Each Linear of the unconverted model, in the model's order, and what was compared besides."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"ran": {}, "sqnr_db": {}, "own_sqnr_db": {}})
    if layers is not None:
        for name in layers.originals:
            found[name]["skipped"] = str(layers.skipped.get(name, ""))
        for each in layers.step(recipe_facts(case.backend, case.recipe).roles).attributions:
            if each.layer in layers.originals:
                found[each.layer]["ran"][each.role] = each.kind
    if numerics is not None:
        limits = limits_of(case.backend, case.recipe)
        for product in numerics.fp8.products:
            if product.power:
                found[product.layer]["sqnr_db"][product.role] = product.sqnr
                found[product.layer]["own_sqnr_db"][product.role] = product.own_sqnr
        for gradient in differences(numerics):
            limit = gradient.limit(limits) if gradient.judged else None
            found[gradient.parameter.removesuffix(".weight")] |= {
                "gradient_error": gradient.relative,
                "gradient_limit": limit,
            }
    return [LayerShown(name, **facts) for name, facts in found.items()]
