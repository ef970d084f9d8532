"""Every sentence of the layers question, from evidence written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import CASE, SIZES, WEIGHT, arm_ledger, layers_evidence
from helpers.two_ledgers import DIFFERENCES, HEALTHY, ledgers, weights
from pytest_fp8 import Case
from pytest_fp8.codes import L
from pytest_fp8.questions.layers.check import check_layers, strictly
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.ledger.evidence import Collective
from pytest_fp8.recipes import ROLES, Reason, Stays

HP = Case("1b", "torchao", "rowwise_with_gw_hp")
GATHERS = Case("1b", "torchao", "tensorwise", parallel="fsdp2", gpus=2, options={"float8_all_gather": True})
RECOMPUTES = Case("1b", "torchao", "tensorwise", activation_checkpointing=True)


def layers(case=CASE, given=(), **changes):
    return check_layers(case, layers_evidence(case=case, **changes), *given)


def with_nothing(**changes):
    """No FP8 layer and no FP8 product."""
    healthy = layers_evidence(bf16=[(name, role) for name in ("q", "up") for role in ROLES])
    calls = [replace(call, fp8=False) for call in healthy.calls]
    gone = {"converted": [], "live_fp8": [], "skipped": {}, "calls": calls}
    return check_layers(CASE, replace(healthy, **{**gone, **changes}))


def with_ledgers(reference=None, **changes):
    return check_layers(CASE, layers_evidence(), ledgers=ledgers(reference=reference, **changes))


def with_weight(before, after):
    """One weight before and after the conversion."""
    model = {**HEALTHY.before, "q.weight": replace(WEIGHT, **before)}
    return with_ledgers(reference=arm_ledger(before=model, after=model), before=model, after=weights(**after))


def of_own(kind=FP8):
    """A function of the user's own in FP8, with its gradients of this kind."""
    call = LayerCall("mix (64 to 128)", 64, 128, 48, fp8=True, by="mix")
    kinds = {"fprop": FP8, "dgrad": kind, "wgrad": kind}
    ran = {role: Product(*call.expected(role), kinds[role], "_scaled_mm", "fp8_kernel_1x1") for role in ROLES}
    return replace(call, ran=ran)


def with_own(kind=FP8, case=CASE, bf16=(), **changes):
    healthy = layers_evidence(bf16, case=case, **changes)
    own = of_own(kind)
    calls, products = [*healthy.calls, own], [*healthy.products, *own.ran.values()]
    return check_layers(case, replace(healthy, calls=calls, products=products))


def recomputed_in_bf16():
    return check_layers(RECOMPUTES, layers_evidence([("q", "recompute")], case=RECOMPUTES, again=["q"]))


def gathered(reference, fp8):
    """Bytes that an all-gather of the forward pass carries in each arm."""
    one, two = ([Collective("forward", "all-gather", "bfloat16", size, 1)] if size else [] for size in (reference, fp8))
    evidence = layers_evidence(case=GATHERS, sharded=["q", "up"])
    return check_layers(GATHERS, evidence, ledgers=ledgers(reference=arm_ledger(wire=one), wire=two))


def differing(code):
    return with_ledgers(**next(changes for changes, found, _ in DIFFERENCES if found is code))


FOUND = {
    L.NOTHING_CONVERTED: with_nothing,
    L.OTHER_LIBRARY: lambda: with_nothing(kinds=dict.fromkeys(SIZES, "torchao.float8.float8_linear.Float8Linear")),
    L.NOT_CONVERTED: lambda: check_layers(
        CASE,
        replace(
            layers_evidence(bf16=[("up", role) for role in ROLES], live_fp8=["q"]),
            calls=[LayerCall(name, i, o, 48, fp8=name == "q") for name, (i, o) in SIZES.items()],
        ),
    ),
    L.LEFT_AND_CONVERTED: lambda: layers(live_fp8=["q", "up", "lm_head"]),
    L.LOST_BEHAVIOUR: lambda: layers(dropped_behaviour={"q": "a forward hook"}),
    L.UNACCOUNTED: lambda: layers(skipped={}),
    L.FP8_OFF: lambda: layers(recipes={"q": {"recipe": "off"}}),
    L.OTHER_RECIPE: lambda: layers(recipes={"q": {"recipe": "current"}}),
    L.NEVER_CALLED: lambda: layers(calls=[]),
    L.AGAINST_RECIPE: lambda: layers(HP),
    L.FPROP_NOT_IN_FP8: lambda: layers(bf16=[("up", "fprop")]),
    L.DGRAD_NOT_IN_FP8: lambda: layers(bf16=[("up", "dgrad")]),
    L.WGRAD_NOT_IN_FP8: lambda: layers(bf16=[("up", "wgrad")]),
    L.RECOMPUTE_NOT_IN_FP8: recomputed_in_bf16,
    L.UNKNOWN_KERNEL: lambda: layers(kernel="cute_1x1"),
    L.LESS_THAN_BASELINE: lambda: layers(given=([0.9],)),
    L.STALE_AMAX: lambda: layers(stale_amax=["q", "up"]),
    L.GATHERS_BF16: lambda: gathered(100_000, 100_000),
    L.WEIGHT_GONE: lambda: differing(L.WEIGHT_GONE),
    L.WEIGHT_RESHAPED: lambda: differing(L.WEIGHT_RESHAPED),
    L.WEIGHT_CAST: lambda: differing(L.WEIGHT_CAST),
    L.WEIGHT_CHANGED: lambda: differing(L.WEIGHT_CHANGED),
    L.TRAINS_FROZEN: lambda: with_weight({"trained": False}, {}),
    L.FREEZES_TRAINED: lambda: with_weight({}, {"trained": False}),
    L.UNTIED: lambda: with_weight({"same_as": "up.weight"}, {}),
    L.HOOK_GONE: lambda: with_weight({"hooks": 1}, {}),
    L.PASSED_BY: lambda: differing(L.PASSED_BY),
    L.NOT_IN_OPTIMIZER: lambda: differing(L.NOT_IN_OPTIMIZER),
    L.NO_GRADIENT: lambda: differing(L.NO_GRADIENT),
    L.NO_FORWARD_IN_FP8: lambda: with_nothing(products=[replace(of_own().ran["fprop"], phase="evaluation")]),
    L.GRADIENTS_NOT_IN_FP8: lambda: with_own("bfloat16"),
    L.LEAVES_NOTHING: lambda: strictly(layers(unmatched=["mlp.*"]), layers_evidence(unmatched=["mlp.*"])),
    L.NO_LINEAR_FITS: lambda: with_nothing(skipped=dict.fromkeys(SIZES, Reason(Stays.HEAD, "a head"))),
}
"""Code -> a decision with it."""


@pytest.mark.parametrize("code", FOUND, ids=lambda code: code.slug)
def test_words(code, snapshot):
    decision = FOUND[code]()
    assert decision.code is code, decision.message
    assert decision.message == snapshot


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"own": True},
        {"unmatched": ["*.ruoter"], "stacked_weights": {"mix": [4, 64, 64]}},
    ],
    ids=["all", "own", "notes"],
)
def test_words_of_a_pass(changes, snapshot):
    decision = with_own() if "own" in changes else check_layers(CASE, layers_evidence(**changes))
    assert decision.message == snapshot


def test_every_code_has_its_words_here():
    assert set(FOUND) == set(L) - {L.NOTHING_GATHERED}, "retired"
