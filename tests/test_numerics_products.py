"""The numerics question's check of products, on evidence written by hand: which ones fail, and with which code."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, layers_evidence, verdict_of
from helpers.numerics import SOUND, evidence, gradients, judge, wrong
from pytest_fp8 import Case, Verdict
from pytest_fp8.codes import N
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.recipes import DGRAD, WGRAD

DELAYED, CURRENT = (Case("1b", "transformer_engine", recipe) for recipe in ("delayed", "current"))
TENSORWISE = Case("own", "torchao", "tensorwise", emulated=True)


def of(case, **given):
    return judge(case, layers_evidence(case=case), **given)


@pytest.mark.parametrize(
    ("product", "code"),
    [
        (wrong(gain=0.97, sqnr=25.9), N.WRONG_SCALE),
        (wrong(role=DGRAD, gain=2.0, sqnr=-0.01), N.WRONG_SCALE),
        (wrong(role=WGRAD, gain=0.0, sqnr=0.0, lost=1.0), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.01, sqnr=-3.0), N.UNRELATED),
        (wrong(role=WGRAD, gain=0.5, sqnr=3.0), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.928, sqnr=17.1), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.5, sqnr=0.0), N.UNRELATED),
        (wrong(role=WGRAD, gain=0.989, sqnr=19.5, lost=0.008), N.PART_MISSING),
        (wrong(role=DGRAD, gain=1.004, sqnr=11.3, lost=0.01), N.TOO_COARSE),
        (wrong(role=DGRAD, sqnr=11.0), N.TOO_COARSE),
        (wrong(gain=math.nan, sqnr=math.nan), N.NOT_FINITE),
        (wrong(gain=1.014, sqnr=17.8, constant=0.98), N.WRONG_BIAS),
        (wrong(gain=1.014, sqnr=17.8, constant=0.1), N.TOO_COARSE),
    ],
    ids=lambda value: "" if isinstance(value, N) else f"{value.role} gain {value.gain} sqnr {value.sqnr}",
)
def test_a_wrong_product_is_named_with_its_role_and_cause(product, code):
    verdict_of(
        judge(products=[product]), Verdict.FAIL, code, f"wrong {product.role} product\n", f"{product.role} of up"
    )


@pytest.mark.parametrize("when", ["products", "later"])
def test_a_small_bias_that_is_missing_is_the_bias(when):
    """Its row has as much power as FP8's own noise: without it the product is as right as the recipe's casts."""
    small = wrong(sqnr=SOUND.own_sqnr - 3.0, constant=0.5)
    verdict_of(of(TENSORWISE, **{when: [small]}), Verdict.FAIL, N.WRONG_BIAS)


@pytest.mark.parametrize(
    "product",
    [
        wrong(sqnr=14.0, own_sqnr=14.3, gain=0.981, own_gain=0.98),
        wrong(power=0.0, gain=0.0, sqnr=math.inf),
        wrong(values=24, sqnr=25.0, gain=1.02, gain_error=0.01),
        wrong(own_sqnr=55.0, sqnr=44.0),
        wrong(role=WGRAD, gain=0.0, sqnr=0.0, own_gain=0.0, own_sqnr=0.0),
    ],
    ids=["outliers", "nothing to multiply", "few rows", "high precision", "casts that leave nothing"],
)
def test_a_sound_product_is_left_alone(product):
    verdict_of(judge(products=[product]), Verdict.PASS)


@pytest.mark.parametrize(
    ("look", "product", "code"),
    [
        ("later", wrong(role=DGRAD, sqnr=14.0), N.STALE),
        ("later", wrong(role=WGRAD, gain=0.5, sqnr=0.0), N.STALE),
        ("later", wrong(role=DGRAD, gain=0.43, sqnr=2.4, lost=0.56), N.PART_MISSING),
        ("later", wrong(role=DGRAD, gain=0.889, sqnr=9.8), N.STALE),
        ("later", wrong(gain=2.0, sqnr=-0.01), N.WRONG_SCALE),
        ("later", wrong(gain=math.nan, sqnr=math.nan), N.NOT_FINITE),
        ("evaluated", wrong(gain=2.0, sqnr=-0.01), N.WRONG_SCALE),
        ("evaluated", wrong(sqnr=14.0), N.TOO_COARSE),
        ("evaluated_later", wrong(sqnr=14.0), N.STALE),
    ],
)
def test_a_product_that_is_wrong_in_another_look_alone_is_named(look, product, code):
    when = {"later": "after 13 training steps", "evaluated": "in an evaluation"}
    when["evaluated_later"] = f"{when['evaluated']} {when['later']}"
    verdict_of(judge(**{look: [product]}), Verdict.FAIL, code, f"product {when[look]}\n")
    verdict_of(judge(**{look: [SOUND]}), Verdict.PASS)


def test_looks_are_named_in_their_order():
    early, late = wrong(role=DGRAD, gain=2.0, sqnr=-0.01), wrong(role=DGRAD, sqnr=11.0)
    verdict_of(judge(products=[early], later=[late]), Verdict.FAIL, "wrong dgrad product\n")
    verdict_of(judge(fp8=gradients(times=4.0), later=[late]), Verdict.FAIL, N.GRADIENT_TIMES)
    evaluated = wrong(gain=2.0, sqnr=-0.01)
    verdict_of(judge(later=[late], evaluated=[evaluated]), Verdict.FAIL, "wrong dgrad product after 13 training steps")


def test_an_fp8_arm_that_alone_cannot_be_evaluated_is_said():
    def said(error, evaluated=(SOUND,)):
        alone = evidence()
        alone = replace(alone, fp8=replace(alone.fp8, evaluation_error=error))
        return check_numerics(CASE, replace(alone, bf16=replace(alone.bf16, evaluated=evaluated)), layers_evidence())

    verdict_of(said("RuntimeError: no kernel\nmore"), Verdict.PASS, "alone raises RuntimeError: no kernel")
    assert "raises" not in said("").message
    assert "raises" not in said("RuntimeError: trains only", evaluated=()).message, "BF16's cannot be, either"


@pytest.mark.parametrize("look", ["products", "later", "evaluated"])
def test_a_layer_that_does_more_than_multiply_in_the_reference_too_is_not_judged(look):
    more = wrong(gain=3.0, sqnr=-6.0)
    verdict_of(judge(**{look: [more]}), Verdict.FAIL)
    alike = evidence(**{look: [more]})
    alike = replace(alike, bf16=replace(alike.bf16, **{look: [replace(SOUND, sqnr=2.0, own_sqnr=55.0)]}))
    verdict_of(check_numerics(CASE, alike, layers_evidence()), Verdict.PASS)


@pytest.mark.parametrize("look", ["later", "evaluated"])
def test_delayed_scaling_alone_has_wider_limits_in_later_looks(look):
    past = [replace(SOUND, sqnr=SOUND.own_sqnr - 8.0)]
    verdict_of(of(DELAYED, **{look: past}), Verdict.PASS)
    verdict_of(of(CURRENT, **{look: past}), Verdict.FAIL)
    verdict_of(of(DELAYED, later=[wrong(gain=2.0, sqnr=-0.01)]), Verdict.FAIL, N.WRONG_SCALE)


def test_a_layer_with_scales_of_past_steps_has_their_limits_whatever_its_recipe():
    past = wrong(sqnr=20.0, gain=0.95, own_scales=True)
    decision = of(TENSORWISE, products=[past], later=[past], evaluated=[wrong(sqnr=20.0)])
    verdict_of(decision, Verdict.PASS, "1 layer(s) with scales of past steps")
    verdict_of(of(TENSORWISE, products=[wrong(sqnr=20.0, gain=0.95)]), Verdict.FAIL)
    verdict_of(of(TENSORWISE, products=[replace(past, gain=2.0, sqnr=-0.01)]), Verdict.FAIL)
