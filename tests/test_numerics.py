"""The numerics question's check: what it says of arms that are sound, that have no FP8, or other formats."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, layers_evidence, verdict_of
from helpers.numerics import SOUND, evidence, gradients, judge
from pytest_fp8 import Case, Verdict
from pytest_fp8.casts import E4M3, E5M2, promised_casts
from pytest_fp8.codes import C, D, N
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.recipes import ROLES, recipe_facts, recipe_options, types


def test_sound_arms_pass_and_say_how_near_they_are():
    decision = judge()
    verdict_of(decision, Verdict.PASS, "6 products of 2 layers right (lowest SQNR 28.4 dB)", "gradients within 5.")
    assert (decision.numbers["products"], decision.numbers["sqnr_db"]) == (6, 28.4)


def test_what_to_do_next_is_for_the_case_that_failed():
    compiled, emulated = Case("tiny", "torchao", "rowwise"), Case("tiny", "torchao", "rowwise", emulated=True)
    assert "`compile=False` in the mark" in judge(compiled, fp8=gradients(times=4.0)).next_step
    one = judge(emulated, fp8=gradients(times={"enter": 2.0}))
    assert "compile" not in one.next_step
    assert "also" not in one.seen


def test_arms_with_other_data_are_not_compared():
    verdict_of(judge(fp8=gradients(data=8)), Verdict.INVALID, D.OTHER_DATA)


def without_products(layers=None):
    sound = evidence()
    arms = [replace(arm, products=[], later=[]) for arm in (sound.fp8, sound.bf16)]
    return check_numerics(CASE, replace(sound, fp8=arms[0], bf16=arms[1]), layers or layers_evidence())


def test_equal_gradients_of_arms_without_fp8_prove_nothing():
    verdict_of(without_products(without_fp8()), Verdict.NOT_EXERCISED, N.NO_FP8_PRODUCT)


def without_fp8():
    """The evidence of a step whose products all ran in BF16."""
    healthy = layers_evidence()
    return replace(healthy, products=[replace(p, kind="bfloat16") for p in healthy.products])


EXACT = [replace(SOUND, layer=layer, role=role, sqnr=55.5) for layer in ("up", "down") for role in ROLES]


def test_right_products_of_converted_layers_without_fp8_prove_nothing():
    decision = judge(products=EXACT, layers=without_fp8())
    verdict_of(decision, Verdict.NOT_EXERCISED, N.NO_FP8_PRODUCT, "as exact as BF16's")


def test_fp8_of_operands_that_it_holds_exactly_is_judged():
    """Powers of two lose nothing in FP8."""
    verdict_of(judge(products=EXACT), Verdict.PASS, "6 products of 2 layers right")


@pytest.mark.parametrize("role", ROLES)
def test_fp8_in_one_role_by_a_kernel_that_no_profile_knows_is_judged(role):
    kept = [p for p in EXACT if p.role != role]
    verdict_of(judge(products=kept, layers=without_fp8()), Verdict.PASS, "6 products of 2 layers right")


def test_layers_whose_products_only_a_profile_shows_are_judged_by_gradients():
    verdict_of(without_products(), Verdict.PASS, "no layer's products can be seen by themselves")


def test_a_loss_that_is_not_finite_in_bf16_is_no_matter_of_fp8():
    bf16 = gradients(off=0.0, loss=math.nan)
    verdict_of(judge(gradients=bf16, fp8=gradients(loss=math.nan)), Verdict.INVALID, C.REFERENCE_NOT_FINITE)


def in_format(formats, phase="forward", fast=None):
    healthy = layers_evidence()
    products = [
        replace(p, formats=formats, fast_accumulation=fast) if p.kind == FP8 and p.phase == phase else p
        for p in healthy.products
    ]
    return replace(healthy, products=products)


def test_a_format_that_was_not_promised_is_named():
    decision = judge(layers=in_format((E5M2, E4M3)))
    verdict_of(decision, Verdict.FAIL, "of the forward pass", N.OTHER_FORMAT, "e4m3 x e5m2")
    verdict_of(judge(layers=in_format((E5M2, E4M3), "backward")), Verdict.PASS)
    verdict_of(judge(layers=in_format((E4M3, E4M3), "backward")), Verdict.FAIL, "of the backward pass")


def test_fast_accumulation_is_for_the_forward_pass():
    verdict_of(judge(layers=in_format((E4M3, E4M3), fast=True)), Verdict.PASS)
    verdict_of(judge(layers=in_format((E5M2, E4M3), "backward", fast=True)), Verdict.FAIL, N.FAST_ACCUMULATION)


@pytest.mark.parametrize(("backend", "recipe"), [(kind.name, facts.name) for kind in types() for facts in kind.recipes])
def test_each_recipe_promises_formats_for_its_roles(backend, recipe):
    casts = promised_casts(backend, recipe, recipe_options(backend, recipe, {}))
    assert tuple(casts) == recipe_facts(backend, recipe).roles
    assert {cast.format for pair in casts.values() for cast in pair} <= {E4M3, E5M2}


def test_a_reference_is_no_fp8_arm():
    assert promised_casts("bf16", "none", {}) == {}
    decision = check_numerics(Case("tiny", "bf16", "none"), evidence(), layers_evidence())
    assert decision.verdict is Verdict.PASS


def test_formats_of_fp8_of_ones_own_are_not_judged():
    """Its recipe cannot be read: E4M3 gradients may be what its author chose."""
    own = replace(in_format((E4M3, E4M3), "backward"), live_fp8=[], converted=[])
    verdict_of(check_numerics(CASE, evidence(), own), Verdict.PASS, "formats were not judged")


@pytest.mark.parametrize("own", [True, False])
def test_recomputed_products_of_compiled_code_have_the_forward_pass_s_formats(own):
    """No hook runs in compiled code: what a user's own checkpointing recomputes lies in the backward pass. Products of
    layers that are not recomputed have no such formats there."""
    case, healthy = Case("1b", "torchao", "tensorwise"), layers_evidence()
    kinds = {"forward": (E4M3, E4M3), "backward": (E5M2, E4M3)}
    ran = [replace(p, formats=kinds[p.phase]) if p.kind == FP8 else p for p in healthy.products]
    again = [replace(p, phase="backward") for p in ran if p.phase == "forward" and p.kind == FP8]
    calls = [replace(call, owed=[*call.owed, *(["recompute"] if own else [])]) for call in healthy.calls]
    decision = judge(case, replace(healthy, products=[*ran, *again], calls=calls))
    verdict_of(
        decision, Verdict.PASS if own else Verdict.FAIL, *([] if own else ["2 FP8 products of the backward pass"])
    )
