"""What the pictures of a report show of one case, as plain data: taken from what its arms have already answered."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_fp8.baselines.review import level
from pytest_fp8.questions.ledger.compare import compare
from pytest_fp8.questions.ledger.evidence import ledgers_of

if TYPE_CHECKING:
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.baselines.record import Baseline

HISTORY = ("speedup", "busy_speedup", "memory_ratio", "loss_gap", "fp8_share")
"""The metrics of a baseline's sessions that are shown."""


def evidence_of(arms: PairArms, baseline: Baseline | None) -> dict[str, Any]:
    """``curves``, ``layers``, ``differences`` and ``history``: each where the case has it. No arm is asked."""
    found: dict[str, Any] = {}
    if arms.answered("loss"):
        found["curves"] = curves_to_json(arms)
    if arms.answered("layers"):
        found["layers"] = layers_to_json(arms)
    if arms.answered("ledger"):
        ledgers = ledgers_of(arms, arms.case.backend)
        found["differences"] = [
            {name: getattr(each, name) for name in ("headline", "what", "reference", "fp8", "cause", "next_step")}
            | {"verdict": each.verdict.value}
            for each in compare(ledgers)
        ]
    if baseline is not None:
        found["history"] = [
            {"date": session.date, "commit": session.commit}
            | {name: level(name, session.metrics[name]) for name in HISTORY if session.metrics.get(name)}
            for session in baseline.sessions
        ]
    return found


def curves_to_json(arms: PairArms) -> list[dict[str, Any]]:
    """Losses of both arms, step by step, in nats or in the unit of the user's own loss; one record per seed."""
    evidence, _ = arms.once("loss", _gathered_before)
    return [
        {"seed": seed, "bf16": list(evidence.bf16[seed].losses), "fp8": list(curve.losses)}
        for seed, curve in sorted(evidence.fp8.items())
        if seed in evidence.bf16
    ]


def layers_to_json(arms: PairArms) -> list[dict[str, Any]]:
    """One record per Linear of the unconverted model: how its products ran, their SQNR beside what the recipe's own
    casts give, and how far the gradient of its weight is off BF16's."""
    from pytest_fp8.questions.layers.evidence import fp8_layers
    from pytest_fp8.recipes import recipe_facts

    case = arms.case
    evidence = fp8_layers(arms)
    ran: dict[str, dict[str, str]] = defaultdict(dict)
    for each in evidence.step(recipe_facts(case.backend, case.recipe).roles).attributions:
        ran[each.layer][each.role] = each.kind
    measured = _numerics_by_layer(arms) if arms.answered("numerics") else {}
    nothing: dict[str, Any] = {"sqnr_db": {}, "own_sqnr_db": {}, "gradient_error": None, "gradient_limit": None}
    return [
        {"layer": name, "skipped": evidence.skipped.get(name, ""), "ran": dict(ran[name])} | measured.get(name, nothing)
        for name in evidence.originals
    ]


def _numerics_by_layer(arms: PairArms) -> dict[str, dict[str, Any]]:
    from pytest_fp8.questions.numerics.draws import with_further_draws
    from pytest_fp8.questions.numerics.evidence import numerics_of
    from pytest_fp8.questions.numerics.gradients import differences
    from pytest_fp8.questions.numerics.limits import limits_of

    case, evidence = arms.case, numerics_of(arms)
    if (arms.reference.key, "moved gradients") in arms.pool.cache:
        evidence = with_further_draws(arms, evidence)
    limits = limits_of(case.backend, case.recipe)
    found: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"sqnr_db": {}, "own_sqnr_db": {}, "gradient_error": None, "gradient_limit": None}
    )
    for product in evidence.fp8.products:
        if product.power:
            found[product.layer]["sqnr_db"][product.role] = product.sqnr
            found[product.layer]["own_sqnr_db"][product.role] = product.own_sqnr
    for each in differences(evidence):
        layer = found[each.parameter.removesuffix(".weight")]
        layer["gradient_error"], layer["gradient_limit"] = each.relative, each.limit(limits)
    return dict(found)


def _gathered_before() -> Any:
    raise AssertionError("asked only where arms.answered() says that it is there")
