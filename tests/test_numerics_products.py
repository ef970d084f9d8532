"""The numerics question's check of products: which ones fail, and in which words; on evidence written by hand."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, layers_evidence, verdict_of
from helpers.numerics import SOUND, evidence, gradients, judge, wrong
from pytest_fp8 import Case, Verdict
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.recipes import DGRAD, WGRAD


def test_delayed_scaling_alone_has_wider_limits_after_training_steps():
    later = [replace(SOUND, sqnr=SOUND.own_sqnr - 8.0)]
    delayed, current = (Case("1b", "transformer_engine", recipe) for recipe in ("delayed", "current"))
    verdict_of(judge(delayed, layers_evidence(case=delayed), later=later), Verdict.PASS)
    verdict_of(judge(current, layers_evidence(case=current), later=later), Verdict.FAIL, " training steps")


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (wrong(gain=0.97, sqnr=25.9), ["up, fprop: gain 0.970", "a wrong scale"]),
        (wrong(role=DGRAD, gain=2.0, sqnr=-0.01), ["wrong dgrad product", "a wrong scale"]),
        (wrong(role=WGRAD, gain=0.0, sqnr=0.0, lost=1.0), ["wgrad of up: it gives zeros"]),
        (wrong(role=WGRAD, gain=0.01, sqnr=-3.0), ["nothing to do with this layer's operands"]),
        (wrong(role=WGRAD, gain=0.5, sqnr=3.0), ["a part of the product is missing"]),
        (wrong(role=WGRAD, gain=0.928, sqnr=17.1), ["a part of the product is missing"]),
        (wrong(role=WGRAD, gain=0.5, sqnr=0.0), ["nothing to do with this layer's operands"]),
        (wrong(role=WGRAD, gain=0.989, sqnr=19.5, lost=0.008), ["wgrad of up: some rows or columns", "a tile at the"]),
        (wrong(role=DGRAD, gain=1.004, sqnr=11.3, lost=0.01), ["dgrad of up: operands are coarser than the recipe's"]),
        (wrong(role=DGRAD, sqnr=11.0), ["SQNR 11.0 dB", "28.5 dB that the recipe's casts give", "E5M2 where E4M3"]),
        (wrong(gain=math.nan, sqnr=math.nan), ["not finite"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else f"{value.role} gain {value.gain} sqnr {value.sqnr}",
)
def test_a_wrong_product_is_named_with_its_role_and_cause(product, words):
    verdict_of(judge(products=[product]), Verdict.FAIL, *words)


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
    ("product", "words"),
    [
        (wrong(role=DGRAD, sqnr=14.0), ["wrong dgrad product after 13 training steps", "kept from an earlier step"]),
        (wrong(role=WGRAD, gain=0.5, sqnr=0.0), ["wgrad of up: something that is kept", "right in the first step"]),
        (wrong(role=DGRAD, gain=0.43, sqnr=2.4, lost=0.56), ["dgrad of up: a part of the product is missing"]),
        (wrong(role=DGRAD, gain=0.889, sqnr=9.8), ["that is kept from an earlier step", "or a part of the product"]),
        (wrong(gain=2.0, sqnr=-0.01), ["fprop of up: a wrong scale", "in step 13"]),
        (wrong(gain=math.nan, sqnr=math.nan), ["not finite"]),
    ],
)
def test_a_product_that_is_wrong_after_training_steps_is_named(product, words):
    verdict_of(judge(later=[product]), Verdict.FAIL, *words)


@pytest.mark.parametrize(
    ("look", "product", "words"),
    [
        ("evaluated", wrong(gain=2.0, sqnr=-0.01), ["product in an evaluation\n", "a wrong scale", "in eval mode"]),
        ("evaluated", wrong(sqnr=14.0), ["product in an evaluation\n", "E5M2 where E4M3"]),
        (
            "evaluated_later",
            wrong(sqnr=14.0),
            ["in an evaluation after 13 training steps", "kept from an earlier step"],
        ),
    ],
)
def test_a_product_that_is_wrong_in_an_evaluation_alone_is_named(look, product, words):
    verdict_of(judge(**{look: [product]}), Verdict.FAIL, *words, "right in the training step")
    sound = {"evaluated": [SOUND], "evaluated_later": [SOUND]}
    decision = judge(**sound)
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["evaluated"] == 2
    verdict_of(judge(**{**sound, look: [wrong(sqnr=55.0)]}), Verdict.PASS)


def test_an_fp8_arm_that_alone_cannot_be_evaluated_is_said():
    def said(error, evaluated=(SOUND,)):
        alone = evidence()
        alone = replace(alone, fp8=replace(alone.fp8, evaluation_error=error))
        return check_numerics(CASE, replace(alone, bf16=replace(alone.bf16, evaluated=evaluated)), layers_evidence())

    verdict_of(said("RuntimeError: no kernel\nmore"), Verdict.PASS, "alone raises RuntimeError: no kernel")
    assert "raises" not in said("").message
    assert "raises" not in said("RuntimeError: trains only", evaluated=()).message, "BF16's cannot be, either"


def test_what_a_layer_of_the_reference_does_in_an_evaluation_too_is_not_judged():
    alike = evidence(evaluated=[wrong(gain=3.0, sqnr=-6.0)])
    alike = replace(alike, bf16=replace(alike.bf16, evaluated=[replace(SOUND, sqnr=2.0, own_sqnr=55.0)]))
    verdict_of(check_numerics(CASE, alike, layers_evidence()), Verdict.PASS)


def test_an_evaluation_is_named_after_what_is_wrong_in_training():
    late, evaluated = wrong(role=DGRAD, sqnr=11.0), wrong(gain=2.0, sqnr=-0.01)
    verdict_of(judge(later=[late], evaluated=[evaluated]), Verdict.FAIL, "wrong dgrad product after 13 training steps")


def test_delayed_scaling_has_its_wider_limits_in_evaluations_too():
    seen = [replace(SOUND, sqnr=SOUND.own_sqnr - 8.0)]
    delayed, current = (Case("1b", "transformer_engine", recipe) for recipe in ("delayed", "current"))
    verdict_of(judge(delayed, layers_evidence(case=delayed), evaluated=seen), Verdict.PASS)
    verdict_of(judge(current, layers_evidence(case=current), evaluated=seen), Verdict.FAIL, "in an evaluation")


def test_the_first_step_is_named_before_later_ones():
    early, late = wrong(role=DGRAD, gain=2.0, sqnr=-0.01), wrong(sqnr=11.0)
    verdict_of(judge(products=[early], later=[late]), Verdict.FAIL, "wrong dgrad product\n")
    verdict_of(judge(fp8=gradients(times=4.0), later=[late]), Verdict.FAIL, "multiplied by 4.0")


def test_what_a_layer_of_the_reference_does_later_too_is_not_judged():
    alike = evidence(later=[replace(SOUND, gain=3.0, sqnr=-6.0)])
    alike = replace(alike, bf16=replace(alike.bf16, later=[replace(SOUND, sqnr=2.0, own_sqnr=55.0)]))
    verdict_of(check_numerics(CASE, alike, layers_evidence()), Verdict.PASS)


def test_delayed_scales_of_past_steps_have_room():
    delayed = Case("tiny", "transformer_engine", "delayed")
    verdict_of(judge(delayed, later=[wrong(sqnr=20.0, gain=0.95)]), Verdict.PASS)
    verdict_of(judge(delayed, later=[wrong(gain=2.0, sqnr=-0.01)]), Verdict.FAIL, "a wrong scale")


def test_a_layer_that_does_more_than_multiply_in_the_reference_too_is_not_judged():
    scaled = [replace(SOUND, gain=3.0, sqnr=-6.0)]
    verdict_of(judge(products=scaled), Verdict.FAIL)
    alike = evidence(products=scaled)
    alike = replace(alike, bf16=replace(alike.bf16, products=[replace(SOUND, sqnr=2.0, own_sqnr=55.0)]))
    verdict_of(check_numerics(CASE, alike, layers_evidence()), Verdict.PASS)


def test_an_error_that_is_one_row_is_the_bias():
    verdict_of(judge(products=[wrong(gain=1.014, sqnr=17.8, constant=0.98)]), Verdict.FAIL, "the bias is added twice")
    verdict_of(judge(products=[wrong(gain=1.014, sqnr=17.8, constant=0.1)]), Verdict.FAIL, "E5M2 where E4M3")


@pytest.mark.parametrize("when", ["products", "later"])
def test_a_small_bias_that_is_missing_is_the_bias(when):
    """Its row has as much power as FP8's own noise: without it the product is as right as the recipe's casts."""
    case = Case("own", "torchao", "tensorwise", emulated=True)
    small = wrong(sqnr=SOUND.own_sqnr - 3.0, constant=0.5)
    decision = judge(case, layers_evidence(case=case), **{when: [small]})
    verdict_of(decision, Verdict.FAIL, "the bias is added twice or missing")


def test_a_layer_with_scales_of_past_steps_has_their_limits_whatever_its_recipe():
    tensorwise = Case("own", "torchao", "tensorwise", emulated=True)
    past = wrong(sqnr=20.0, gain=0.95, own_scales=True)
    layers = layers_evidence(case=tensorwise)
    decision = judge(tensorwise, layers, products=[past], later=[past], evaluated=[wrong(sqnr=20.0)])
    verdict_of(decision, Verdict.PASS, "1 layer(s) with scales of past steps")
    verdict_of(judge(tensorwise, layers, products=[wrong(sqnr=20.0, gain=0.95)]), Verdict.FAIL)
    verdict_of(judge(tensorwise, layers, products=[replace(past, gain=2.0, sqnr=-0.01)]), Verdict.FAIL)
