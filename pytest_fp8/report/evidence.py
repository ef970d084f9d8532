"""What the pictures of a report show of one case, as plain data: taken from what its arms have already answered."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.review import level
from pytest_fp8.questions.asks import fp8_layers, ledgers_of, numerics_of
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.questions.numerics.draws import with_further_draws
from pytest_fp8.questions.numerics.evidence import NumericsEvidence
from pytest_fp8.questions.numerics.gradients import differences
from pytest_fp8.questions.numerics.limits import limits_of
from pytest_fp8.recipes import recipe_facts

if TYPE_CHECKING:
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.baselines.record import Baseline
    from pytest_fp8.case import Case
    from pytest_fp8.plan import Begin
    from pytest_fp8.questions.loss.evidence import LossEvidence

HISTORY = ("speedup", "busy_speedup", "memory_ratio", "loss_gap", "fp8_share")
"""The metrics of a baseline's sessions that are shown."""


def evidence_of(arms: PairArms, baseline: Baseline | None, curves: Begin[LossEvidence]) -> dict[str, Any]:
    """``curves``, ``layers``, ``numerics``, ``differences``, ``history``: each where the case has it. Asks no arm."""
    found: dict[str, Any] = {}
    if (loss := arms.known(curves)) is not None:
        found["curves"] = curves_to_json(loss)
    if (layers := arms.known(fp8_layers)) is not None:
        found["layers"] = layers_to_json(arms.case, layers)
    if (numerics := arms.known(numerics_of)) is not None:
        drawn = arms.known(lambda: with_further_draws(arms.case, numerics))
        found["numerics"] = numerics_to_json(arms.case, drawn or numerics)
    if (ledgers := arms.known(lambda: ledgers_of(arms.case.backend))) is not None:
        found["differences"] = [
            {
                "verdict": each.verdict.value,
                "code": str(each.code),
                "headline": each.headline,
                "what": each.about,
                "reference": each.expected,
                "fp8": each.seen,
                "cause": each.cause,
                "next_step": each.next_step,
            }
            for each in compare(ledgers)
        ]
    if baseline is not None:
        found["history"] = [
            {"date": session.date, "commit": session.commit}
            | {name: level(name, session.metrics[name]) for name in HISTORY if session.metrics.get(name)}
            for session in baseline.sessions
        ]
    return found


def curves_to_json(evidence: LossEvidence) -> list[dict[str, Any]]:
    """Losses of both arms, step by step, in nats or in the unit of the user's own loss; one record per seed."""
    return [
        {"seed": seed, "bf16": list(evidence.bf16[seed].losses), "fp8": list(curve.losses)}
        for seed, curve in sorted(evidence.fp8.items())
        if seed in evidence.bf16
    ]


def layers_to_json(case: Case, evidence: LayersEvidence) -> list[dict[str, Any]]:
    """One record per Linear of the unconverted model: the kind of its product in each role."""
    ran: dict[str, dict[str, str]] = defaultdict(dict)
    for each in evidence.step(recipe_facts(case.backend, case.recipe).roles).attributions:
        ran[each.layer][each.role] = each.kind
    return [
        {"layer": name, "skipped": str(evidence.skipped.get(name, "")), "ran": ran.get(name, {})}
        for name in evidence.originals
    ]


def numerics_to_json(case: Case, evidence: NumericsEvidence) -> list[dict[str, Any]]:
    """One record per module with a product or a weight that was compared: the SQNR of its products beside what the
    recipe's own casts give, and how far its weight's gradient is off BF16's."""
    limits = limits_of(case.backend, case.recipe)
    sqnr: dict[str, dict[str, float]] = defaultdict(dict)
    own: dict[str, dict[str, float]] = defaultdict(dict)
    for product in evidence.fp8.products:
        if product.power:
            sqnr[product.layer][product.role] = product.sqnr
            own[product.layer][product.role] = product.own_sqnr
    gradients = {
        each.parameter.removesuffix(".weight"): (each.relative, each.limit(limits) if each.judged else None)
        for each in differences(evidence)
    }
    found = []
    for layer in dict.fromkeys([*sqnr, *gradients]):
        error, limit = gradients.get(layer, (None, None))
        compared = {"gradient_error": error, "gradient_limit": limit}
        found.append({"layer": layer, "sqnr_db": sqnr.get(layer, {}), "own_sqnr_db": own.get(layer, {}), **compared})
    return found
