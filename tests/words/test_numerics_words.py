"""Every sentence of the numerics question, from evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, layers_evidence
from helpers.numerics import SOUND, evidence, gradients, judge, wrong
from pytest_fp8 import Case
from pytest_fp8.casts import E4M3, E5M2
from pytest_fp8.codes import C, D, N
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.questions.numerics.evidence import HandedOn
from pytest_fp8.recipes import DGRAD, ROLES, WGRAD

TENSORWISE = Case("own", "torchao", "tensorwise", emulated=True)


def of(mine=(), theirs=(), **given):
    """Judged evidence, with changes of what each arm says."""
    found = evidence(**given)
    changed = replace(found, fp8=replace(found.fp8, **dict(mine)), bf16=replace(found.bf16, **dict(theirs)))
    return check_numerics(CASE, changed, layers_evidence())


def cast_to(formats, phase="forward", fast=None):
    ran = [
        replace(p, formats=formats, fast_accumulation=fast) if p.kind == FP8 and p.phase == phase else p
        for p in layers_evidence().products
    ]
    return judge(layers=layers_evidence(products=ran))


def without_fp8(*products):
    layers = layers_evidence()
    layers = replace(layers, products=[replace(p, kind="bfloat16") for p in layers.products])
    return judge(products=products, layers=layers)


def named(name, times=1.0, off=0.05, **changes):
    """Gradients in which ``up`` is the parameter ``name``."""
    found = gradients(times={"up": times}, off={"up": off}, **changes)
    return replace(found, sketches={name if n == "up" else n: text for n, text in found.sketches.items()})


def gradient_of(name, products=(), **changes):
    return judge(products=products, fp8=named(name, **changes), gradients=named(name, off=0.0), moved=named(name))


def handed_on(cosine=1.0, factor=1.0):
    given = [HandedOn(layer, 1.0, 1.0, 1.0) for layer in "abc"]
    return of(
        {"handed_on": [*given, HandedOn("d", cosine, factor, 1.0)]},
        {"handed_on": [*given, HandedOn("d", 1.0, 1.0, 1.0)]},
    )


EXACT = [replace(SOUND, layer=layer, role=role, sqnr=55.5) for layer in ("up", "down") for role in ROLES]
PAST = wrong(sqnr=20.0, gain=0.95, own_scales=True)
FOUND = [
    (N.NO_FP8_PRODUCT, "", without_fp8(*EXACT)),
    (N.OTHER_FORMAT, "", cast_to((E5M2, E4M3))),
    (N.FAST_ACCUMULATION, "", cast_to((E5M2, E4M3), "backward", fast=True)),
    (N.GIVES_ZEROS, "", judge(products=[wrong(role=WGRAD, gain=0.0, sqnr=0.0, lost=1.0)])),
    (N.NOT_FINITE, "", judge(products=[wrong(gain=math.nan, sqnr=math.nan)])),
    (
        N.WRONG_SCALE,
        "",
        judge(products=[wrong(gain=0.97, sqnr=25.9), wrong(layer="down", role=DGRAD, gain=2.0, sqnr=-0.01)]),
    ),
    (N.PART_MISSING, "", judge(products=[wrong(role=WGRAD, gain=0.5, sqnr=3.0)])),
    (N.UNRELATED, "", judge(products=[wrong(role=WGRAD, gain=0.5, sqnr=0.0)])),
    (N.TOO_COARSE, "", judge(products=[wrong(role=DGRAD, sqnr=11.0)])),
    (N.STALE, "", judge(later=[wrong(role=DGRAD, sqnr=14.0)])),
    (N.STALE, "in an evaluation", judge(evaluated_later=[wrong(sqnr=14.0)])),
    (N.TILE_LEFT_OUT, "", judge(products=[wrong(role=WGRAD, gain=0.989, sqnr=19.5, lost=0.008)])),
    (N.WRONG_BIAS, "", judge(products=[wrong(gain=1.014, sqnr=17.8, constant=0.98)])),
    (
        N.OUTLIER,
        "",
        gradient_of(
            "up.weight",
            off=0.7,
            products=[wrong(role=WGRAD, gain=0.0, own_gain=0.0, own_sqnr=0.0, sqnr=0.0, underflow=0.75)],
        ),
    ),
    (N.GRADIENT_NOT_FINITE, "", judge(fp8=gradients(times={"enter": math.inf}))),
    (N.GRADIENT_TIMES, "", judge(fp8=gradients(times=4.0))),
    (N.GRADIENT_MISSING, "", judge(fp8=gradients(off={"up": 0.9}, times={"up": 0.1}))),
    (N.BIAS_GRADIENT, "", gradient_of("up.bias", times=0.0625)),
    (N.OTHER_GRADIENT, "", judge(Case("tiny", "torchao", "rowwise"), fp8=gradients(off={"enter": 0.7}))),
    (N.GRADIENT_REPLACED, "", handed_on(cosine=0.5)),
    (N.GRADIENT_SCALED, "", handed_on(factor=0.9)),
    (N.TOO_SENSITIVE, "", judge(fp8=gradients(off=0.9), moved=gradients(off=0.9))),
    (C.REFERENCE_NOT_FINITE, "", judge(gradients=gradients(off=0.0, loss=math.nan), fp8=gradients(loss=math.nan))),
    (D.OTHER_DATA, "", judge(fp8=gradients(data=8))),
    (D.OTHER_RANDOM_NUMBERS, "", judge(fp8=gradients(off=0.7, random="other"))),
    (D.NOT_REDUCED, "", judge(fp8=gradients(apart="up: 1.00 on rank 0, 1.20 on rank 1"))),
    (None, "", judge()),
    (
        None,
        "sensitive",
        judge(fp8=gradients(off=0.4), moved=gradients(off={"up": 0.9, "down": 0.5, "head": 0.5, "enter": 0.05})),
    ),
    (None, "scales of past steps", judge(TENSORWISE, layers_evidence(case=TENSORWISE), products=[PAST], later=[PAST])),
    (
        None,
        "apart, not evaluated",
        of(
            {"evaluation_error": "RuntimeError: no kernel\nmore"},
            {"evaluated": [SOUND]},
            fp8=gradients(apart="a"),
            gradients=gradients(off=0.0, apart="a"),
        ),
    ),
]
"""Code, what is special, and the decision."""


@pytest.mark.parametrize(
    ("code", "_", "decision"),
    FOUND,
    ids=[" ".join(filter(None, (code.slug if code else "PASS", what))) for code, what, _ in FOUND],
)
def test_words(code, _, decision, snapshot):
    assert decision.code is code, decision.message
    assert decision.message == snapshot


def test_every_code_has_its_words_here():
    assert set(N) - {"FP8-N18", "FP8-N20"} <= {code for code, *_ in FOUND}, "retired"
