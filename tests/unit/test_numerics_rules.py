"""The numerics question: formats, products and gradients of arms, written by hand, and what is decided of them."""

from __future__ import annotations

import math
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.evidence import CASE, StandIn, layers_evidence, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.casts import E4M3, E5M2, promised_casts
from pytest_fp8.codes import C, D, N
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.questions.numerics.check import check_numerics, find_in_handed_on, with_further_draws
from pytest_fp8.questions.numerics.evidence import ArmNumerics, Gradients, HandedOn, NumericsEvidence, ProductCheck
from pytest_fp8.recipes import DGRAD, FPROP, ROLES, WGRAD, recipe_facts, recipe_options, types

PASS, FAIL, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INVALID
INCONCLUSIVE, NOT_EXERCISED = Verdict.INCONCLUSIVE, Verdict.NOT_EXERCISED
DELAYED, CURRENT = (Case("1b", "transformer_engine", recipe) for recipe in ("delayed", "current"))
TENSORWISE = Case("own", "torchao", "tensorwise", emulated=True)
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


def gradients(off=0.05, times=1.0, up="up", without=(), **changes):
    """``off``, ``times``: one value for all names, or a dictionary by name; ``up``: another name for ``up``."""

    def of(value, name, default):
        return value.get(name, default) if isinstance(value, dict) else value

    vectors = {name: vector(name, of(off, name, 0.05), of(times, name, 1.0)) for name in NAMES if name not in without}
    sketches = {
        up if name == "up" else name: b64encode(v.astype(np.float32).tobytes()).decode() for name, v in vectors.items()
    }
    return replace(Gradients(sketches, [], 5.0, 7), **changes)


def evidence(products=(), fp8=None, later=(), more=None, further=(), **reference):
    """Healthy evidence of three roles of two layers, but for ``products`` and ``later``, which replace those of their
    layer and role. ``fp8``: its gradients; ``more``: what else its arm says; ``reference``: what BF16's does."""
    healthy = {(layer, role): replace(SOUND, layer=layer, role=role) for role in ROLES for layer in ("up", "down")}

    def with_(changed):
        return list({**healthy, **{(p.layer, p.role): p for p in changed}}.values())

    exact = [replace(p, sqnr=55.0, own_sqnr=55.0) for p in healthy.values()]
    bf16 = replace(ArmNumerics(exact, gradients(off=0.0), gradients(), exact), **reference)
    mine = ArmNumerics(with_(products), fp8 or gradients(), None, with_(later), **(more or {}))
    return NumericsEvidence(mine, bf16, further=further)


def judge(case=CASE, layers=None, **given):
    return check_numerics(case, evidence(**given), layers or layers_evidence(case=case))


def wrong(**changes):
    return replace(SOUND, **changes)


def look(field, *products, case=CASE, **given):
    """Products in one of the looks; those of evaluations are of the FP8 arm alone."""
    return judge(case, **({"more": {field: products}} if "evaluated" in field else {field: products}), **given)


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "code"),
    [
        (wrong(gain=0.97, sqnr=25.9), N.WRONG_SCALE),
        (wrong(role=DGRAD, gain=2.0, sqnr=-0.01), N.WRONG_SCALE),
        (wrong(role=WGRAD, gain=0.5, sqnr=0.0), N.UNRELATED),
        (wrong(role=WGRAD, gain=0.989, sqnr=19.5, lost=0.008), N.PART_MISSING),
        # Zeros that the casts do not give, and values of another product where a gain of 0.2 is left.
        (wrong(role=WGRAD, gain=0.02, sqnr=-1.0, lost=0.995), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.0, sqnr=0.0, lost=0.5), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.25, sqnr=0.97), N.PART_MISSING),
        # A gradient in E4M3 without a scale, most of which underflows; and rows permuted where half of the units are
        # dead.
        (wrong(role=DGRAD, gain=0.653, sqnr=2.7, lost=0.879), N.PART_MISSING),
        (wrong(role=DGRAD, gain=0.025, sqnr=0.01, lost=0.741), N.PART_MISSING),
        (wrong(role=WGRAD, gain=0.02, sqnr=-2.9, lost=0.25), N.UNRELATED),
        (wrong(role=WGRAD, gain=0.1, sqnr=0.45), N.UNRELATED),
        (wrong(role=DGRAD, gain=1.004, sqnr=11.3, lost=0.01), N.TOO_COARSE),
        (wrong(role=DGRAD, gain=1.5, sqnr=1.0), N.TOO_COARSE),
        (wrong(role=DGRAD, gain=0.9, own_gain=0.9, sqnr=19.5), N.TOO_COARSE),
        (wrong(gain=math.inf), N.NOT_FINITE),
        (wrong(sqnr=math.nan), N.NOT_FINITE),
        (wrong(gain=1.014, sqnr=17.8, of_bias=0.98), N.WRONG_BIAS),
        (wrong(gain=1.014, sqnr=17.8, of_bias=0.1), N.TOO_COARSE),
    ],
    ids=lambda value: "" if isinstance(value, N) else f"{value.role} gain {value.gain} sqnr {value.sqnr}",
)
def test_a_wrong_product_is_named_with_its_role_and_cause(product, code):
    decision = judge(products=[product])
    verdict_of(decision, FAIL, code, f"wrong {product.role} product\n", f"{product.role} of up")


PADDED = wrong(role=WGRAD, gain=0.0, own_gain=0.0, own_sqnr=0.0, sqnr=0.0, underflow=0.75)
STALE, DOUBLE, PAST = wrong(sqnr=14.0), wrong(gain=2.0, sqnr=-0.01), wrong(sqnr=SOUND.own_sqnr - 8.0)
DOUBLE_DGRAD, COARSE_DGRAD = replace(DOUBLE, role=DGRAD), wrong(role=DGRAD, sqnr=11.0)
SMALL_BIAS = wrong(sqnr=SOUND.own_sqnr - 3.0, of_bias=0.5)
"""Its row has as much power as FP8's own noise: without it the product is as right as the recipe's casts."""
MORE, ALIKE = wrong(gain=3.0, sqnr=-6.0), [replace(SOUND, sqnr=2.0, own_sqnr=55.0)]
"""Of a layer that does more than multiply, and its product in the reference."""
OWN_SCALES = wrong(sqnr=20.0, gain=0.95, own_scales=True)
UNKNOWN = Case("1b", "transformer_engine", "mxfp8")
"""A recipe without healthy arms on record."""
LATER, EVALUATED = "product after 13 training steps\n", "product in an evaluation\n"
NOISY, MOVED, FAR = gradients(0.4), gradients(0.5), gradients({"up": 0.9})
APART = gradients(apart="up: 1.00 on rank 0, 1.20 on rank 1")
WITHOUT_FP8 = layers_evidence()
WITHOUT_FP8 = replace(WITHOUT_FP8, products=[replace(p, kind="bfloat16") for p in WITHOUT_FP8.products])
EXACT = [replace(SOUND, layer=layer, role=role, sqnr=55.5) for layer in ("up", "down") for role in ROLES]


def of(name, products=(), handed_on=1.0, **changes):
    """Gradients in which ``up`` is the parameter ``name``. ``handed_on``: how near what the optimizer is given is."""
    fp8 = gradients(up=name, **{key: {"up": value} for key, value in changes.items()})
    near, exact = ([HandedOn("up", cosine, 1.0, 1.0)] for cosine in (handed_on, 1.0))
    reference = {"gradients": gradients(0.0, up=name), "moved": gradients(up=name), "handed_on": exact}
    return judge(products=products, fp8=fp8, more={"handed_on": near}, **reference)


def does_more(field, **reference):
    """In one of the looks, and in the reference's look of this name."""
    given = {"more": {field: [MORE]}} if field == "evaluated" else {field: [MORE]}
    found = evidence(**given)
    return check_numerics(CASE, replace(found, bf16=replace(found.bf16, **reference)), layers_evidence())


def evaluation(error, *products):
    return judge(more={"evaluation_error": error}, evaluated=products)


def without_products(layers=None):
    sound = evidence()
    arms = [replace(arm, products=[], later=[]) for arm in (sound.fp8, sound.bf16)]
    return check_numerics(CASE, replace(sound, fp8=arms[0], bf16=arms[1]), layers or layers_evidence())


def in_format(formats, phase="forward", fast=None, **changes):
    healthy = layers_evidence()
    products = [
        replace(p, formats=formats, fast_accumulation=fast) if p.kind == FP8 and p.phase == phase else p
        for p in healthy.products
    ]
    return judge(layers=replace(healthy, products=products, **changes))


def recomputed_in_compiled_code(own):
    """No hook runs there: what a user's own checkpointing recomputes lies in the backward pass. ``own``: the layers are
    recomputed. Products of others have no formats of the forward pass there."""
    healthy, kinds = layers_evidence(), {"forward": (E4M3, E4M3), "backward": (E5M2, E4M3)}
    ran = [replace(p, formats=kinds[p.phase]) if p.kind == FP8 else p for p in healthy.products]
    again = [replace(p, phase="backward") for p in ran if p.phase == "forward" and p.kind == FP8]
    calls = [replace(call, owed=[*call.owed, *(["recompute"] if own else [])]) for call in healthy.calls]
    case = Case("1b", "torchao", "tensorwise")
    return judge(case, replace(healthy, products=[*ran, *again], calls=calls))


FOUND = [  # decision, code, what the message says
    # Looks: in the first step, in a later one, in evaluations.
    (lambda: look("later", wrong(role=WGRAD, gain=0.5, sqnr=0.0)), N.STALE, LATER),
    (lambda: look("later", wrong(role=DGRAD, gain=0.43, sqnr=2.4, lost=0.56)), N.PART_MISSING, LATER),
    (lambda: look("later", wrong(role=DGRAD, gain=0.889, sqnr=9.8)), N.STALE, LATER),
    (lambda: look("evaluated", DOUBLE), N.WRONG_SCALE, EVALUATED),
    (lambda: look("evaluated_later", STALE), N.STALE, "product in an evaluation after 13 training steps\n"),
    (lambda: judge(products=[DOUBLE_DGRAD], later=[COARSE_DGRAD]), None, "wrong dgrad product\n"),
    (lambda: judge(fp8=gradients(times=4.0), later=[COARSE_DGRAD]), N.GRADIENT_TIMES, "it is the first"),
    (lambda: look("evaluated", DOUBLE, later=[COARSE_DGRAD]), None, "after 13 training steps"),
    # Other limits: a small bias, more than a product, scales of past steps, a recipe that is not on record.
    *((lambda f=f: look(f, SMALL_BIAS, case=TENSORWISE), N.WRONG_BIAS, "") for f in ("products", "later")),
    *((lambda f=f: does_more(f), None, "") for f in ("products", "later", "evaluated")),
    *((lambda f=f: look(f, PAST, case=CURRENT), None, "") for f in ("later", "evaluated")),
    (lambda: look("later", DOUBLE, case=DELAYED), N.WRONG_SCALE, ""),
    (lambda: judge(TENSORWISE, products=[replace(OWN_SCALES, own_scales=False)]), None, ""),
    (lambda: judge(TENSORWISE, products=[replace(OWN_SCALES, gain=2.0, sqnr=-0.01)]), None, ""),
    (lambda: judge(UNKNOWN, products=[wrong(sqnr=SOUND.own_sqnr - 4.5)]), N.TOO_COARSE, ""),  # an e5m2 operand
    (lambda: judge(UNKNOWN, fp8=gradients(off=0.3)), N.OTHER_GRADIENT, ""),
    # Gradients: named where the error begins.
    (lambda: judge(fp8=gradients(times={"up": 2.0, "enter": 2.0})), N.GRADIENT_TIMES, "in backward order is down"),
    (lambda: judge(fp8=gradients(times={"down": 0.0})), N.OTHER_GRADIENT, "down: 0.00 times"),
    (lambda: judge(fp8=gradients(off={"enter": 0.7})), N.OTHER_GRADIENT, "enter: "),
    (lambda: judge(fp8=gradients(off={"up": 0.3}, times={"up": 0.96})), N.OTHER_GRADIENT, "up: "),
    (lambda: judge(fp8=gradients(off={"up": 0.9}, times={"up": 1.5})), N.OTHER_GRADIENT, "up: "),
    (lambda: judge(fp8=gradients(without=["up"], silent=["up"])), N.OTHER_GRADIENT, "up: 0.00 times"),
    (lambda: judge(fp8=gradients(off=0.7, random="other")), D.OTHER_RANDOM_NUMBERS, ""),
    # What the step shows besides is the cause.
    (lambda: of("up.bias", times=0.0625), N.BIAS_GRADIENT, "up.bias"),
    (lambda: of("up.weight", [PADDED], off=0.7), N.OUTLIER, "wgrad of up"),
    # Another step's gradient is given to the optimizer, or one that is stored too coarsely.
    (lambda: of("up.weight", off=0.7, handed_on=0.8), N.GRADIENT_REPLACED, ""),
    # Gradients that moved weights change by half are judged by their factor.
    (lambda: judge(fp8=gradients(0.4, {"up": 2.0, "enter": 2.0}), moved=MOVED), None, "2 of 4 gradients"),
    (lambda: judge(fp8=gradients(times={"down": 0.0}), moved=MOVED), N.OTHER_GRADIENT, ""),
    (lambda: judge(fp8=gradients(times={"up": math.inf}), moved=FAR), N.OTHER_GRADIENT, ""),
    (lambda: judge(fp8=APART, gradients=gradients(off=0.0)), D.NOT_REDUCED, ""),
    # Formats.
    (lambda: in_format((E5M2, E4M3)), N.OTHER_FORMAT, "of the forward pass"),
    (lambda: in_format((E5M2, E4M3)), N.OTHER_FORMAT, "e4m3 x e5m2"),
    (lambda: in_format((E4M3, E4M3), "backward"), N.OTHER_FORMAT, "of the backward pass"),
    (lambda: in_format((E5M2, E4M3), "backward", fast=True), N.FAST_ACCUMULATION, ""),
    (lambda: recomputed_in_compiled_code(own=False), None, "2 FP8 products of the backward pass"),
]  # fmt: skip


@pytest.mark.parametrize(("decision", "code", "says"), FOUND)
def test_what_is_wrong_is_named(decision, code, says):
    verdict_of(decision(), FAIL, says, *([code] if code else []))


RIGHT = "6 products of 2 layers right"
SOUND_ARMS = [  # decision, what the message says
    (judge, f"{RIGHT} (lowest SQNR 28.4 dB), gradients within 5."),
    (lambda: judge(Case("tiny", "bf16", "none"), layers_evidence()), ""),
    (lambda: judge(UNKNOWN), ""),
    *((lambda f=f: look(f, SOUND), "") for f in ("later", "evaluated", "evaluated_later")),
    # Outliers, nothing to multiply, few rows, high precision, casts that leave nothing.
    (lambda: judge(products=[wrong(sqnr=14.0, own_sqnr=14.3, gain=0.981, own_gain=0.98)]), ""),
    (lambda: judge(products=[wrong(power=0.0, gain=0.0, sqnr=math.inf)]), ""),
    (lambda: judge(products=[wrong(values=24, sqnr=25.0, gain=1.02, gain_error=0.01)]), ""),
    (lambda: judge(products=[wrong(own_sqnr=55.0, sqnr=44.0)]), ""),
    (lambda: judge(products=[wrong(role=WGRAD, gain=0.0, sqnr=0.0, own_gain=0.0, own_sqnr=0.0)]), ""),
    *((lambda f=f: does_more(f, **{f: ALIKE}), "") for f in ("products", "later", "evaluated")),
    # Delayed scaling, and a layer with scales of past steps whatever its recipe.
    *((lambda f=f: look(f, PAST, case=DELAYED), "") for f in ("later", "evaluated")),
    (
        lambda: look("evaluated", wrong(sqnr=20.0), case=TENSORWISE, products=[OWN_SCALES], later=[OWN_SCALES]),
        "1 layer(s) with scales of past steps",
    ),
    (lambda: evaluation("RuntimeError: no kernel\nmore", SOUND), "the FP8 arm alone raises RuntimeError: no kernel"),
    # None is known to be zero that was not said to be, and what is there is no zero although another one is.
    (lambda: judge(fp8=gradients(without=["up"])), ""),
    (lambda: judge(fp8=gradients(silent=["up"])), ""),
    (lambda: judge(fp8=NOISY, moved=MOVED), "4 sensitive ones within a factor of 1 +-"),
    # One expert, whose rows a small change moves.
    (lambda: judge(fp8=gradients({"up": 0.6}), moved=gradients({"up": 0.6})), ""),
    # At 0.8 of a gradient the limit would be 3 to 4 times its length: nothing is found there.
    (lambda: judge(fp8=gradients({"up": 3.5}), moved=FAR), "1 of 4 not judged"),
    # Ranks that keep their gradients in both arms may reduce them later.
    (lambda: judge(fp8=APART, gradients=gradients(off=0.0, apart="a")), "differ between the ranks in both arms"),
    # Powers of two lose nothing in FP8. FP8 in one role, by a kernel that no profile knows.
    (lambda: judge(products=EXACT), RIGHT),
    (lambda: judge(products=[p for p in EXACT if p.role != FPROP], layers=WITHOUT_FP8), RIGHT),
    (without_products, "no layer's products can be seen by themselves"),
    (lambda: in_format((E5M2, E4M3), "backward"), ""),
    (lambda: in_format((E4M3, E4M3), fast=True), ""),
    # The recipe of FP8 of one's own cannot be read: E4M3 gradients may be what its author chose.
    (lambda: in_format((E4M3, E4M3), "backward", live_fp8=[], converted=[]), "formats were not judged"),
    (lambda: recomputed_in_compiled_code(own=True), ""),
]


@pytest.mark.parametrize(("decision", "says"), SOUND_ARMS)
def test_sound_arms_pass(decision, says):
    verdict_of(decision(), PASS, says)


@pytest.mark.parametrize(("error", "products"), [("", [SOUND]), ("RuntimeError: trains only", [])])
def test_an_error_of_both_arms_evaluations_or_none_is_not_said(error, products):
    decision = evaluation(error, *products)
    verdict_of(decision, PASS)
    assert "raises" not in decision.message


NAN = {"gradients": gradients(0.0, loss=math.nan), "fp8": gradients(loss=math.nan)}


@pytest.mark.parametrize(
    ("decision", "verdict", "code", "says"),
    [
        (lambda: judge(fp8=gradients(off=0.9), moved=gradients(off=0.9)), INCONCLUSIVE, N.TOO_SENSITIVE, ""),
        (lambda: judge(fp8=gradients(data=8)), INVALID, D.OTHER_DATA, ""),
        (lambda: judge(**NAN), INVALID, C.REFERENCE_NOT_FINITE, ""),
        (lambda: judge(gradients=gradients(off=0.0, apart="up")), INVALID, D.NOT_REDUCED, ""),
        (lambda: without_products(WITHOUT_FP8), NOT_EXERCISED, N.NO_FP8_PRODUCT, ""),
        (lambda: judge(products=EXACT, layers=WITHOUT_FP8), NOT_EXERCISED, N.NO_FP8_PRODUCT, "as exact as BF16's"),
    ],
)
def test_what_shows_nothing_of_fp8_proves_nothing(decision, verdict, code, says):
    verdict_of(decision(), verdict, code, says)


@pytest.mark.parametrize(
    ("fp8", "moved", "further", "verdict"),
    [
        # A router that sends a row another way in one draw of nine; the bias of attention's keys, which is noise.
        (gradients({"up": 0.5}), gradients(), [gradients(), gradients({"up": 0.6})], PASS),
        # A sensitive factor is judged by how far moved weights move it.
        (gradients(0.2, {"up": 0.5}), gradients(0.4), [gradients(0.2, {"up": 0.7})], PASS),
        (gradients(times=4.0), gradients(), [gradients(), gradients(0.1), gradients(0.15)], FAIL),
    ],
)
def test_what_some_way_of_moving_weights_does_is_no_fault_and_hides_none(fp8, moved, further, verdict):
    verdict_of(judge(fp8=fp8, moved=moved), FAIL, "gradient")
    verdict_of(judge(fp8=fp8, moved=moved, further=further), verdict)


def test_the_figures_are_of_what_was_compared():
    sound, less, far = judge(), judge(fp8=gradients(without=["up"])), judge(moved=gradients({"up": 0.9}))
    assert (sound.numbers["products"], sound.numbers["sqnr_db"]) == (6, 28.4)
    assert (less.numbers["gradients"], far.numbers["not_judged"]) == (len(NAMES) - 1, 1)


def test_the_reference_is_asked_for_further_draws_where_a_gradient_looks_wrong():
    asked = []

    class Arm:
        def request(self, operation, of, draws, operands):
            asked.append(operation)
            return [to_plain(gradients(off=0.6)) for _ in range(draws + operands)]

    def drawn(seen):
        return StandIn(CASE, Arm()).run(lambda: with_further_draws(CASE, seen))

    assert not drawn(evidence()).further
    assert not asked
    verdict_of(check_numerics(CASE, drawn(evidence(fp8=gradients(off={"up": 0.5}))), layers_evidence()), PASS)
    assert asked == ["moved"]


# -- what there is to judge, and formats ------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "recipe"), [(kind.name, facts.name) for kind in types() for facts in kind.recipes])
def test_each_recipe_promises_formats_for_its_roles(backend, recipe):
    casts = promised_casts(backend, recipe, recipe_options(backend, recipe, {}))
    assert tuple(casts) == recipe_facts(backend, recipe).roles
    assert {cast.format for pair in casts.values() for cast in pair} <= {E4M3, E5M2}


# -- what the optimizer is given --------------------------------------------------------------------------------------


def handed(cosines=(1.0,) * 4, factors=(1.0,) * 4, layers="abcd", lengths=None):
    return [HandedOn(*each) for each in zip(layers, cosines, factors, lengths or (1.0,) * len(layers), strict=True)]


def found_in(fp8, bf16=None, later=None):
    bf16 = handed() if bf16 is None else bf16
    one = SimpleNamespace(handed_on=fp8, handed_on_later=handed() if later is None else later)
    return find_in_handed_on(SimpleNamespace(fp8=one, bf16=SimpleNamespace(handed_on=bf16, handed_on_later=handed())))


@pytest.mark.parametrize(
    ("fp8", "bf16"),
    [
        (handed(cosines=(0.9994,) * 4, factors=(1.0, 1.0015, 0.9985, 1.0)), handed()),
        # Both arms clip, each by its own norm.
        (handed(factors=(0.31,) * 4), handed(factors=(0.35,) * 4)),
        # Each layer is clipped by its own norm: FP8 moves these.
        (handed(factors=(0.3, 0.5, 0.8, 1.0)), handed(factors=(0.33, 0.52, 0.75, 1.0))),
        # One layer's norm is above its limit in FP8 alone.
        (handed(factors=(1.0, 0.96, 1.0, 1.0), lengths=(1.0, 1.05, 1.0, 0.97)), handed()),
        # A penalty, a projection, noise: BF16's optimizer is given something else as well.
        (handed(cosines=(0.5, 1.0, 1.0, 1.0)), handed(cosines=(0.6, 1.0, 1.0, 1.0))),
        # Too few layers to tell one factor from that of all.
        (handed((1.0, 1.0), (0.9, 1.0), "ab"), handed((1.0, 1.0), (1.0, 1.0), "ab")),
        # One arm steps twice.
        (handed() + handed(cosines=(0.1,) * 4), handed()),
        (handed(), []),
    ],
)
def test_gradients_that_are_handed_on_soundly_are_not_failed(fp8, bf16):
    assert found_in(fp8, bf16) is None


@pytest.mark.parametrize(
    ("fp8", "later", "code", "seen"),
    [
        ({"factors": (0.31, 0.31, 0.279, 0.31)}, {}, N.GRADIENT_SCALED, "c: times 0.279, of the other layers 0.310"),
        ({"factors": (1.0, 1.0, 1.0, math.nan)}, {}, N.GRADIENT_SCALED, "d: times nan"),
        ({}, {"cosines": (1.0, -1.0, 1.0, 1.0)}, N.GRADIENT_REPLACED, "b: cosine -1.000"),
        ({}, {"cosines": (1.0, math.nan, 1.0, 1.0)}, N.GRADIENT_REPLACED, "b: cosine nan"),
    ],
)
def test_a_layer_whose_gradient_is_scaled_or_another_is_named(fp8, later, code, seen):
    finding = found_in(handed(**fp8), handed(factors=(0.35,) * 4), handed(**later))
    assert finding.code is code
    assert finding.seen.startswith(seen)
    assert finding.headline.endswith("after 13 training steps") == bool(later)
