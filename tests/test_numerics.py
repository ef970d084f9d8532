"""The numerics question's check: which products and gradients fail, and in which words; on evidence written by hand."""

import math
from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from helpers.evidence import CASE, layers_evidence, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.casts import E4M3, E5M2, promised_casts
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.questions.numerics.draws import with_further_draws
from pytest_fp8.questions.numerics.evidence import ArmNumerics, Gradients, NumericsEvidence, ProductCheck
from pytest_fp8.recipes import DGRAD, FPROP, RECIPES, ROLES, WGRAD, recipe_options

SOUND = ProductCheck(
    layer="up",
    role=FPROP,
    values=16384,
    power=1.0,
    gain=1.001,
    sqnr=28.4,
    own_gain=1.0,
    own_sqnr=28.5,
    gain_error=0.0005,
    lost=0.0,
    underflow=0.01,
)
NAMES = ("head", "down", "up", "enter")
"""Parameters in the order of the backward pass."""


def vector(name, off=0.0, times=1.0):
    """A gradient that is the same for each name, ``off`` by a share of its length in a direction of its own."""
    generator = np.random.default_rng([*name.encode()])
    base, other = generator.normal(size=1024), generator.normal(size=1024)
    return times * (base + off * other)


def gradients(off=0.05, times=1.0, **changes):
    """``off``, ``times``: one value for all names, or a dictionary by name."""

    def of(value, name, default):
        return value.get(name, default) if isinstance(value, dict) else value

    vectors = {name: vector(name, of(off, name, 0.05), of(times, name, 1.0)) for name in NAMES}
    sketches = {name: b64encode(v.astype(np.float32).tobytes()).decode() for name, v in vectors.items()}
    return replace(Gradients(sketches, [], 5.0, 7), **changes)


def evidence(products=(), fp8=None, later=(), evaluated=(), evaluated_later=(), **changes):
    """Healthy evidence of three roles of two layers, but for ``products``, which replace those of their layer and
    role; and for products of evaluations."""
    mine = {(p.layer, p.role): p for layer in ("up", "down") for p in [replace(SOUND, layer=layer)]}
    for role in ROLES:
        for layer in ("up", "down"):
            mine[layer, role] = replace(SOUND, layer=layer, role=role)
    reference = [replace(p, sqnr=55.0, own_sqnr=55.0) for p in mine.values()]
    mine |= {(p.layer, p.role): p for p in products}
    bf16 = ArmNumerics(reference, gradients(off=0.0), gradients(), reference)
    first = list(mine.values())
    sound = [replace(SOUND, layer=p.layer, role=p.role) for p in first]
    later = list(({(p.layer, p.role): p for p in sound} | {(p.layer, p.role): p for p in later}).values())
    mine = ArmNumerics(first, fp8 or gradients(), None, later, evaluated, evaluated_later)
    return NumericsEvidence(mine, replace(bf16, **changes))


def judge(case=CASE, layers=None, **given):
    return check_numerics(case, evidence(**given), layers or layers_evidence())


def test_delayed_scaling_alone_has_wider_limits_after_training_steps():
    later = [replace(SOUND, sqnr=SOUND.own_sqnr - 8.0)]
    delayed, current = (Case("1b", "transformer_engine", recipe) for recipe in ("delayed", "current"))
    verdict_of(judge(delayed, layers_evidence(case=delayed), later=later), Verdict.PASS)
    verdict_of(judge(current, layers_evidence(case=current), later=later), Verdict.FAIL, " training steps")


def test_the_numbers_are_the_worst_of_each_role():
    bad = replace(SOUND, sqnr=28.1, gain=0.995)
    later = replace(SOUND, layer="down", role=DGRAD, gain=1.004)
    numbers = judge(products=[bad], later=[later]).numbers
    assert numbers["roles"][FPROP]["products"] == 2
    assert (numbers["roles"][FPROP]["sqnr_db"], numbers["roles"][DGRAD]["sqnr_db"]) == (28.1, 28.4)
    errors = [numbers["roles"][role]["gain_error"] for role in (FPROP, DGRAD)] + [numbers["later_gain_error"]]
    assert errors == pytest.approx([0.005, 0.001, 0.004])
    assert numbers["later_worst"].startswith("down, dgrad: gain 1.0040 and 28.40 dB, its casts gain ")


def wrong(**changes):
    return replace(SOUND, **changes)


def test_sound_arms_pass_and_say_how_near_they_are():
    decision = judge()
    verdict_of(decision, Verdict.PASS, "6 products of 2 layers right (lowest SQNR 28.4 dB)", "gradients within 5.")
    assert decision.numbers["roles"][WGRAD]["products"] == 2


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
    ],
    ids=["outliers", "nothing to multiply", "few rows", "high precision"],
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


@pytest.mark.parametrize(
    ("fp8", "words"),
    [
        (gradients(times=4.0), ["4 of 4 gradients", "head: 4.0", "multiplied by 4.0", "it is the first"]),
        (
            gradients(times={"up": 2.0, "enter": 2.0}),
            ["2 of 4 gradients", "the last right one in backward order is down"],
        ),
        (gradients(times={"down": 0.0}), ["no gradient arrives at down"]),
        (gradients(off={"enter": 0.7}), ["enter", "a part of the tokens or values is lost"]),
        (gradients(off={"up": 0.3}, times={"up": 0.96}), ["computes something else from up on"]),
        (gradients(off={"up": 0.9}, times={"up": 1.5}), ["computes something else from up on"]),
        (gradients(times={"up": 0.1}), ["up is multiplied by 0.0"]),
        (
            gradients(off={"up": 0.9}, times={"up": 0.1}),
            ["almost no gradient arrives at up", "0.13 times"],
        ),
        (gradients(times={"enter": math.inf}), ["the gradient of enter is not finite"]),
        (
            gradients(silent=["up"], sketches={n: gradients().sketches[n] for n in NAMES if n != "up"}),
            ["arrives at up"],
        ),
    ],
    ids=[
        "all times four",
        "upstream twice",
        "zeros",
        "noise",
        "small factor",
        "not a factor",
        "a tenth",
        "short",
        "infinite",
        "none",
    ],
)
def test_a_wrong_gradient_is_named_where_the_error_begins(fp8, words):
    verdict_of(judge(fp8=fp8), Verdict.FAIL, *words)


def test_a_gradient_that_is_not_known_of_one_arm_is_not_compared():
    """None is known to be zero that was not said to be, and what is there is no zero although another one is."""
    known = {n: text for n, text in gradients().sketches.items() if n != "up"}
    decision = judge(fp8=gradients(sketches=known))
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["gradients"] == len(NAMES) - 1
    verdict_of(judge(fp8=gradients(silent=["up"])), Verdict.PASS)


def renamed(name, times=1.0, off=0.05, **changes):
    """Gradients in which ``up`` is the parameter ``name``."""
    found = gradients(times={"up": times}, off={"up": off}, **changes)
    return replace(found, sketches={name if n == "up" else n: text for n, text in found.sketches.items()})


def of(name, fp8, **changes):
    return judge(fp8=fp8, gradients=renamed(name, off=0.0), moved=renamed(name), **changes)


def test_a_factor_on_gradients_of_biases_alone_is_said_with_its_size():
    decision = of("up.bias", renamed("up.bias", times=0.0625))
    verdict_of(decision, Verdict.FAIL, "up.bias is multiplied by 0.06", "only gradients of biases are wrong")


def test_a_weight_gradient_that_is_rounded_after_its_product_is_named():
    stored = renamed("up.weight", off=0.7, zeros={"up.weight": 0.6})
    words = ["only gradients of FP8 layers' weights are wrong (up.weight)", "60% of the values of up.weight's are 0"]
    verdict_of(of("up.weight", stored), Verdict.FAIL, *words)
    handed_on = renamed("up.weight", off=0.7)
    handed_on = replace(handed_on, sketches={**handed_on.sketches, "enter": gradients(off=0.7).sketches["enter"]})
    verdict_of(of("up.weight", handed_on), Verdict.FAIL, "something else from up.weight on")


def test_other_random_numbers_are_the_first_cause():
    verdict_of(judge(fp8=gradients(off=0.7, random="other")), Verdict.FAIL, "draw other random numbers in this step")


def test_a_forward_pass_that_differs_is_named_where_it_begins():
    def outputs(**off):
        vectors = {n: vector(n, off.get(n, 0.03)) for n in ("enter", "norm", "up")}
        return {n: b64encode(v.astype(np.float32).tobytes()).decode() for n, v in vectors.items()}

    given = evidence(fp8=gradients(off=0.7), outputs=outputs(enter=0.0, norm=0.0, up=0.0))
    other = replace(given, fp8=replace(given.fp8, outputs=outputs(norm=0.5, up=0.6)))
    decision = check_numerics(CASE, other, layers_evidence())
    verdict_of(decision, Verdict.FAIL, "the forward pass differs already: norm gives")
    alike = replace(given, fp8=replace(given.fp8, outputs=outputs()))
    verdict_of(check_numerics(CASE, alike, layers_evidence()), Verdict.FAIL, "the backward pass of the FP8 arm")


def test_an_error_that_is_one_row_is_the_bias():
    verdict_of(judge(products=[wrong(gain=1.014, sqnr=17.8, constant=0.98)]), Verdict.FAIL, "the bias is added twice")
    verdict_of(judge(products=[wrong(gain=1.014, sqnr=17.8, constant=0.1)]), Verdict.FAIL, "E5M2 where E4M3")


def test_what_to_do_next_is_for_the_case_that_failed():
    compiled, emulated = Case("tiny", "torchao", "rowwise"), Case("tiny", "torchao", "rowwise", emulated=True)
    assert "compile=False in the mark" in judge(compiled, fp8=gradients(times=4.0)).next_step
    one = judge(emulated, fp8=gradients(times={"enter": 2.0}))
    assert "compile" not in one.next_step
    assert "also" not in one.seen


def test_gradients_that_any_small_change_moves_decide_nothing():
    verdict_of(judge(fp8=gradients(off=0.9), moved=gradients(off=0.9)), Verdict.INCONCLUSIVE, "too sensitive")


def test_sensitive_gradients_are_judged_by_their_factor():
    """As those of a 1B model with random weights, which moved weights change by half."""
    moved = gradients(off=0.5)
    sound = judge(fp8=gradients(off=0.4), moved=moved)
    verdict_of(sound, Verdict.PASS, "4 sensitive ones within a factor of 1 +-")
    twice = gradients(off=0.4, times={"up": 2.0, "enter": 2.0})
    verdict_of(judge(fp8=twice, moved=moved), Verdict.FAIL, "2 of 4 gradients", "up", "times BF16's")
    verdict_of(judge(fp8=gradients(times={"down": 0.0}), moved=moved), Verdict.FAIL, "no gradient arrives at down")


@pytest.mark.parametrize("further", [gradients(off={"up": 0.6}), gradients(off={"up": 0.2})], ids=["noise", "flips"])
def test_what_some_way_of_moving_weights_does_is_no_fault(further):
    """A router that sends a row another way in one draw of nine; the bias of attention's keys, which is noise."""
    seen = evidence(fp8=gradients(off={"up": 0.5}))
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.FAIL, "gradient")
    seen = replace(seen, further=[gradients(), further])
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.PASS)


def test_a_sensitive_factor_is_judged_by_how_far_moved_weights_move_it():
    moved, fp8 = gradients(off=0.4), gradients(off=0.2, times={"up": 0.5})
    seen = evidence(fp8=fp8, moved=moved)
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.FAIL, "is multiplied by")
    seen = replace(seen, further=[gradients(off=0.2, times={"up": 0.7})])
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.PASS)


@pytest.mark.parametrize("fp8", [gradients(times=4.0), gradients(times={"up": 0.0}), gradients(times={"up": math.nan})])
def test_further_draws_hide_no_fault(fp8):
    seen = replace(evidence(fp8=fp8), further=[gradients(), gradients(off=0.1), gradients(off=0.15)])
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.FAIL, "gradient")


class Arms:
    """A reference that tells what its weights do when they are moved in further ways."""

    case = CASE

    def __init__(self):
        self.bf16, self.asked = self, []

    def request(self, operation, draws, operands):
        self.asked.append(operation)
        return [to_plain(gradients(off=0.6)) for _ in range(draws + operands)]

    def shared(self, what, ask):
        return ask()


def test_the_reference_is_asked_for_further_draws_where_a_gradient_looks_wrong():
    arms = Arms()
    assert not with_further_draws(arms, evidence()).further
    assert not arms.asked
    seen = with_further_draws(arms, evidence(fp8=gradients(off={"up": 0.5})))
    assert arms.asked == ["moved_gradients"]
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.PASS)


def test_one_expert_whose_rows_a_small_change_moves_is_left_alone():
    flips = {"up": 0.6}
    verdict_of(judge(fp8=gradients(off=flips), moved=gradients(off=flips)), Verdict.PASS)


def test_arms_with_other_data_are_not_compared():
    verdict_of(judge(fp8=gradients(data=8)), Verdict.INVALID, "different data")


def without_products(layers=None):
    sound = evidence()
    arms = [replace(arm, products=[], later=[]) for arm in (sound.fp8, sound.bf16)]
    return check_numerics(CASE, replace(sound, fp8=arms[0], bf16=arms[1]), layers or layers_evidence())


def test_equal_gradients_of_arms_without_fp8_prove_nothing():
    verdict_of(without_products(without_fp8()), Verdict.NOT_EXERCISED, "no FP8 product to judge", "assert_layers")


def without_fp8():
    """The evidence of a step whose products all ran in BF16."""
    healthy = layers_evidence()
    return replace(healthy, products=[replace(p, kind="bfloat16") for p in healthy.products])


EXACT = [replace(SOUND, layer=layer, role=role, sqnr=55.5) for layer in ("up", "down") for role in ROLES]


def test_right_products_of_converted_layers_without_fp8_prove_nothing():
    decision = judge(products=EXACT, layers=without_fp8())
    verdict_of(decision, Verdict.NOT_EXERCISED, "no FP8 product to judge", "as exact as BF16's", "assert_layers")


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
    verdict_of(judge(gradients=bf16, fp8=gradients(loss=math.nan)), Verdict.INVALID, "BF16 arm's loss is not finite")


def in_format(formats, phase="forward", fast=None):
    healthy = layers_evidence()
    products = [
        replace(p, formats=formats, fast_accumulation=fast) if p.kind == FP8 and p.phase == phase else p
        for p in healthy.products
    ]
    return replace(healthy, products=products)


def test_a_format_that_was_not_promised_is_named():
    decision = judge(layers=in_format((E5M2, E4M3)))
    verdict_of(decision, Verdict.FAIL, "of the forward pass", "e4m3 x e5m2 where e4m3 x e4m3 was promised")
    verdict_of(judge(layers=in_format((E5M2, E4M3), "backward")), Verdict.PASS)
    verdict_of(judge(layers=in_format((E4M3, E4M3), "backward")), Verdict.FAIL, "of the backward pass")


def test_fast_accumulation_is_for_the_forward_pass():
    verdict_of(judge(layers=in_format((E4M3, E4M3), fast=True)), Verdict.PASS)
    verdict_of(judge(layers=in_format((E5M2, E4M3), "backward", fast=True)), Verdict.FAIL, "fast accumulation")


@pytest.mark.parametrize(("backend", "recipe"), RECIPES)
def test_each_recipe_promises_formats_for_its_roles(backend, recipe):
    casts = promised_casts(backend, recipe, recipe_options(backend, recipe, {}))
    assert tuple(casts) == RECIPES[backend, recipe].roles
    assert {cast.format for pair in casts.values() for cast in pair} <= {E4M3, E5M2}


def test_a_reference_is_no_fp8_arm():
    assert promised_casts("bf16", "none", {}) == {}
    decision = check_numerics(Case("tiny", "bf16", "none"), evidence(), layers_evidence())
    assert decision.verdict is Verdict.PASS
