"""What a loss needs to speak of FP8: weights that move, a reference that learns, FP8 to the end, one quantity."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.evidence import curves, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.pair import look_again
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import Curve, LayerCalls, Look, LossEvidence, Moved, ProductCount, loss_looks
from pytest_fp8.rules.loss import LOSS_MARGIN, LossScale, decide_loss, loss_fall, loss_margin, loss_noise

BASELINES = Path(__file__).parents[1] / "baselines"
MOVES = {"up": Moved(4096, 0.99, 1.0), "down": Moved(4096, 0.98, 1.0), "norm": Moved(64, 0.0, 1.0)}
STEP = {"forward": ProductCount(14, 1), "backward": ProductCount(28, 2)}


def arm(offset=0.0, moves=MOVES, first=STEP, last=STEP, **more):
    return {
        s: replace(c, movement=moves, first_products={} if s else first, last_products=last)
        for s, c in curves(offset, **more).items()
    }


def decided(fp8=None, bf16=None, **changes):
    bf16 = bf16 or arm(wobble=0.0)
    return check_loss(LossEvidence(fp8=fp8 or arm(0.001), bf16=bf16, twin=bf16, **changes))


def test_arms_that_learn_alike_pass():
    decision = decided()
    verdict_of(decision, Verdict.PASS)
    assert decision.numbers["moved"] > 0.97


def test_a_loss_that_reaches_no_weight_says_nothing_of_fp8():
    """Its gradients are all 0, so that no weight is among those that should move."""
    still = {"moves": {name: Moved(4096, 0.0, 0.0) for name in MOVES}}
    decision = decided(fp8=arm(0.001, **still), bf16=arm(wobble=0.0, **still))
    says = "0.0% after 20 steps; no weight had a gradient other than 0", "does not depend on the weights"
    verdict_of(decision, Verdict.NOT_EXERCISED, *says)


# -- presence over time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"forward": ProductCount(0, 15), "backward": ProductCount(0, 30)}, "FP8 ran in step 0 and not in step 19"),
        ({"forward": ProductCount(14, 1), "backward": ProductCount(0, 30)}, "FP8 ran in step 0 and not in step 19"),
        (
            {"forward": ProductCount(13, 2), "backward": ProductCount(28, 2)},
            "less ran in FP8 in step 19 than in step 0",
        ),
        ({"forward": ProductCount(14, 1)}, "FP8 ran in step 0 and not in step 19"),
    ],
    ids=["all off", "backward off", "one layer off", "no backward products"],
)
def test_fp8_that_is_off_at_the_end_fails(last, says):
    verdict_of(decided(arm(0.001, last=last)), Verdict.FAIL, says, "switched FP8 off while the arm trained")


def with_calls(calls, seed=1):
    fp8 = arm(0.001)
    fp8[seed] = replace(fp8[seed], calls=calls)
    return fp8


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (LayerCalls([14] * 3 + [0] + [14] * 16, [0] * 3 + [14] + [0] * 16), "FP8 ran in step 0 and not in step 3"),
        (LayerCalls([14] * 18 + [13] * 2, [0] * 18 + [1] * 2), "less ran in FP8 in step 18 than in step 0"),
        (LayerCalls([0] * 2 + [14] * 18, [14] * 2 + [0] * 18), "FP8 ran in step 2 and not in step 0"),
    ],
    ids=["one step", "one layer", "the first steps"],
)
def test_fp8_that_is_off_in_some_steps_fails_with_their_numbers(calls, says):
    decision = decided(with_calls(calls))
    verdict_of(decision, Verdict.FAIL, says, "seed 1", "of 20 steps")
    assert decision.numbers["named"]


@pytest.mark.parametrize(
    "calls",
    [LayerCalls(), LayerCalls([14] * 10 + [9] * 10, [0] * 20), LayerCalls([0] * 20, [14] * 20)],
    ids=["compiled", "an expert rests", "a library without autograd functions"],
)
def test_calls_that_say_nothing_of_fp8_pass(calls):
    verdict_of(decided(with_calls(calls)), Verdict.PASS)


def products(*errors, layer="up", share=0.97, rough=100.0):
    """``share``: of the error of FP8 at its finest, one for all or one for each; ``rough``: of that at its coarsest."""
    shares = share if isinstance(share, list) else [share] * len(errors)
    roughs = [1.0 if error <= 0.01 else rough for error in errors]
    return LayerCalls(
        [1] * 20, [0] * 20, {layer: [Look(*each) for each in zip(range(20), errors, shares, roughs, strict=False)]}
    )


def test_a_product_that_is_more_exact_than_fp8_can_be_fails_with_its_step():
    calls = products(*[0.001] * 8, share=[0.97] * 5 + [0.003] + [1.4] * 2)
    decision = decided(with_calls(calls))
    verdict_of(decision, Verdict.FAIL, "multiplied in high precision", "0.3% of that error in step 5, seed 1", "1 of 8")
    assert decision.numbers["named"]


def test_products_that_are_as_exact_as_fp8_can_be_pass():
    verdict_of(decided(with_calls(products(*[0.001] * 8, share=0.05))), Verdict.PASS)


def test_one_product_that_is_wrong_among_right_ones_fails():
    decision = decided(with_calls(products(*[0.001] * 6, 0.4, *[0.001] * 6)))
    verdict_of(decision, Verdict.FAIL, "wrong in some steps and right in most", "40.0% in step 6, seed 1", "1 of 13")
    assert not decision.numbers["named"]
    verdict_of(decided(with_calls(products(*[0.001] * 6, math.nan))), Verdict.FAIL, "nan% in step 6")


@pytest.mark.parametrize(("rough", "verdict"), [(1.8, Verdict.PASS), (4.5, Verdict.FAIL), (math.nan, Verdict.FAIL)])
def test_one_product_that_is_as_wrong_as_fp8_may_be_there_is_no_fault(rough, verdict):
    """Training that diverges has values that take the digits of all others."""
    verdict_of(decided(with_calls(products(*[0.001] * 6, 0.2, *[0.001] * 6, rough=rough))), verdict)


@pytest.mark.parametrize(
    "errors",
    [[0.001] * 12 + [0.0035], [0.3] * 6 + [0.9] * 2, []],
    ids=["the largest of sound arms", "a layer that does more", "none"],
)
def test_products_as_of_sound_arms_pass(errors):
    verdict_of(decided(with_calls(products(*errors))), Verdict.PASS)


def test_fp8_that_is_off_at_the_end_of_a_later_seed_alone_fails():
    fp8 = arm(0.001)
    fp8[2] = replace(fp8[2], last_products={"forward": ProductCount(0, 15), "backward": ProductCount(0, 30)})
    verdict_of(decided(fp8), Verdict.FAIL, "seed 2")


@pytest.mark.parametrize(
    "last",
    [
        {"forward": ProductCount(10, 1), "backward": ProductCount(20, 2)},
        {"forward": ProductCount(28, 2), "backward": ProductCount(56, 4)},
        {"forward": ProductCount(16, 3), "backward": ProductCount(32, 6)},
        {},
    ],
    ids=["experts that rest", "a second micro-batch", "other experts", "a step that was not watched"],
)
def test_steps_that_differ_in_work_are_no_finding(last):
    verdict_of(decided(arm(0.001, last=last)), Verdict.PASS)


# -- weights that move ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("down", "says"),
    [
        (Moved(4096, 0.0, 0.0), "gradients are zero or lost"),
        (Moved(4096, 0.0, 1.0), "a learning rate of 0"),
        (Moved(4096, 0.3, 0.3), "1 of 3 weights train only in part"),
    ],
)
def test_a_weight_that_does_not_move_as_in_the_reference_fails(down, says):
    verdict_of(decided(arm(0.001, moves={**MOVES, "down": down})), Verdict.FAIL, says, "98.0% of down")


def test_a_loss_that_stays_up_since_weights_stand_still_is_told_by_these():
    fp8 = {
        s: replace(c, losses=[5.001 + s / 1000] * len(c.losses))
        for s, c in arm(moves={**MOVES, "down": Moved(4096, 0.0, 1.0)}).items()
    }
    verdict_of(decided(fp8), Verdict.FAIL, "1 of 3 weights do not train in the FP8 arm", "a learning rate of 0")


def test_an_expert_that_rests_with_one_seed_is_no_finding():
    fp8 = arm(0.001)
    fp8[1] = replace(fp8[1], movement={**MOVES, "down": Moved(4096, 0.0, 0.0)})
    verdict_of(decided(fp8), Verdict.PASS)


@pytest.mark.parametrize("norm", [Moved(64, 0.9, 1.0), Moved(64, 0.0, 0.0)])
def test_a_small_parameter_decides_nothing(norm):
    """A few elements can be rounded away by chance."""
    verdict_of(decided(arm(0.001, moves={**MOVES, "norm": norm})), Verdict.PASS)


def slow(share):
    return {"up": Moved(10**6, share, 1.0), "head": Moved(10**4, 0.9, 1.0)}


@pytest.mark.parametrize(("share", "verdict"), [(0.077, Verdict.NOT_EXERCISED), (0.30, Verdict.PASS)])
def test_a_rate_that_moves_few_weights_asks_nothing_of_fp8(share, verdict):
    """7.7 % of an 8B model's weights moved at rate 5e-6, 30 % of a 1B model's at 3e-5."""
    decision = decided(arm(0.001, moves=slow(share)), arm(wobble=0.0, moves=slow(share)))
    verdict_of(decision, verdict)
    if verdict is Verdict.NOT_EXERCISED:
        assert "master weights in float32" in decision.message


def test_rows_that_no_gradient_reaches_do_not_count():
    embedding = {**MOVES, "embed": Moved(10**6, 0.003, 0.003)}
    verdict_of(decided(arm(0.001, moves=embedding), arm(wobble=0.0, moves=embedding)), Verdict.PASS)


def test_a_higher_loss_fails_although_few_weights_move():
    drift = {
        s: replace(c, losses=[x + 0.01 * t for t, x in enumerate(c.losses)])
        for s, c in arm(0.001, moves=slow(0.05)).items()
    }
    verdict_of(decided(drift, arm(wobble=0.0, moves=slow(0.05))), Verdict.FAIL, "higher loss than BF16")


# -- a reference that learns ------------------------------------------------------------------------------------------


def flat(offset=0.0, noise=0.05, slope=0.0, seeds=3, steps=40):
    draws = np.random.default_rng(3)
    every = draws.normal(0, noise, (seeds, steps))
    return {
        s: Curve(s, (2.3 + offset * (1 + s / 9) + every[s] - slope * np.arange(steps)).tolist(), [1.0 + offset] * steps)
        for s in range(seeds)
    }


def test_a_loss_that_does_not_fall_is_never_a_pass():
    verdict_of(decided(flat(0.0005), flat()), Verdict.NOT_EXERCISED, "BF16 learns nothing", "loss_steps")
    verdict_of(decided(flat(0.0005, slope=-0.01), flat(slope=-0.01)), Verdict.NOT_EXERCISED, "an adversarial one")
    verdict_of(decided(flat(0.0005, slope=0.01), flat(slope=0.01)), Verdict.PASS)


def test_a_loss_of_noise_is_taken_for_learning_as_rarely_as_it_says():
    rng = np.random.default_rng(1)
    seen = [loss_fall(2.3 + rng.normal(0, 0.05, (3, 40))).learns for _ in range(2000)]
    assert 0.01 < np.mean(seen) < 0.05


# -- a lower loss -----------------------------------------------------------------------------------------------------


def lower(by):
    return {
        s: replace(c, losses=[x - (by + 0.002 * s if t else 0.0) for t, x in enumerate(c.losses)])
        for s, c in arm(0.001).items()
    }


def test_a_lower_loss_wants_an_explanation():
    decision = decided(lower(0.3))
    verdict_of(decision, Verdict.INCONCLUSIVE, "lower loss than BF16, by more than noise", "a mean over fewer tokens")
    assert decision.numbers["gap"] < -0.3 + 0.01
    verdict_of(decided(lower(0.03)), Verdict.PASS)


@pytest.mark.parametrize("twin", ["twin", "fp8_twin"])
def test_a_lower_loss_within_either_arms_own_spread_passes(twin):
    bf16 = arm(wobble=0.0)
    fp8 = lower(0.3)
    away = {s: replace(c, losses=[x + (0.2, -0.2, 0.1)[s] for x in c.losses]) for s, c in (arm(wobble=0.0)).items()}
    drift = {s: replace(c, losses=[x + (0.2, -0.2, 0.1)[s] for x in c.losses]) for s, c in fp8.items()}
    twins = {"twin": away} if twin == "twin" else {"twin": bf16, "fp8_twin": drift}
    verdict_of(check_loss(LossEvidence(fp8=fp8, bf16=bf16, **twins)), Verdict.PASS)


SCALES = {"own.moe": 0.208}
"""What the margins of an own model are a share of: its reference's loss, which ended below 1 on an H200."""


def recorded():
    """(id, gaps, gaps of BF16 against BF16, scale) of the sound cases that are stored."""
    for path in sorted(BASELINES.rglob("[!_]*.json")):
        stored = load_baseline(path)
        if stored.values("loss_gap"):
            scale = SCALES.get(path.stem.partition("-")[0], 1.0)
            yield path.stem, stored.values("loss_gap"), stored.values("loss_twin_gap"), scale


RECORDED = list(recorded())


@pytest.mark.parametrize(("name", "gaps", "twins", "scale"), RECORDED, ids=[name for name, *_ in RECORDED])
def test_no_sound_case_on_record_is_called_too_low_or_too_high(name, gaps, twins, scale):
    floor = max(LOSS_MARGIN[1] * scale, loss_noise(twins))
    gap = decide_loss(gaps, loss_margin(twins, LossScale(scale)), 0.0, floor)
    assert not gap.below
    assert gap.verdict is not Verdict.FAIL


# -- both arms' own spread --------------------------------------------------------------------------------------------


def test_the_margin_is_of_the_arm_with_more_noise():
    assert loss_margin([0.001], LossScale(1.0), fp8_gaps=[0.012, -0.008]) == pytest.approx(loss_noise([0.012, -0.008]))
    assert loss_margin([0.012, -0.008], LossScale(1.0), fp8_gaps=[0.001]) == pytest.approx(loss_noise([0.012, -0.008]))


class Arms:
    def __init__(self, gap, drift):
        self.case, self.asked = Case("own", "torchao", "tensorwise", emulated=True, loss_seeds=3), []
        self.bf16, self.fp8 = Arm(self, "bf16", 0.0, 0.0), Arm(self, "fp8", gap, drift)

    def shared(self, what, ask):
        return ask()

    once = shared

    def beside(self, operation, reference, **arguments):
        return self.fp8.request(operation, **arguments), reference()


class Arm:
    def __init__(self, arms, name, gap, drift):
        self.arms, self.name, self.gap, self.drift = arms, name, gap, drift

    def request(self, operation, seed, steps, jitter=False, watch=False):
        self.arms.asked.append((self.name, seed, jitter))
        assert watch == (self.name == "fp8" and not jitter)
        end = self.gap * (1 + seed / 50) + self.drift * (-1) ** seed * jitter
        losses = [5 + seed / 1e4 - t / steps + (end if t else 0.0) for t in range(steps)]
        return to_plain(Curve(seed, losses, [1.0 + (self.name == "fp8")] * steps))


@pytest.mark.parametrize(("drift", "verdict"), [(0.0, Verdict.FAIL), (0.014, Verdict.PASS)])
def test_no_gap_fails_before_the_fp8_arms_own_spread_is_known(drift, verdict):
    """0.03 nats are more than the smallest margin, and less than three times 0.014."""
    arms = Arms(0.03, drift)
    evidence, gap = look_again(loss_looks(arms, twin=True), judge_gap)
    assert gap.verdict is verdict
    assert sorted(evidence.fp8_twin) == [0, 1, 2]


def test_seeds_that_pass_at_once_ask_no_twin_of_the_fp8_arm():
    arms = Arms(0.001, 0.0)
    evidence, gap = look_again(loss_looks(arms, twin=True), judge_gap)
    assert gap.verdict is Verdict.PASS
    assert not evidence.fp8_twin
    assert ("fp8", 0, True) not in arms.asked


def test_a_stored_margin_asks_no_twin_at_all():
    arms = Arms(0.06, 0.0)
    look_again(loss_looks(arms, twin=False), lambda evidence: judge_gap(evidence, [0.001] * 3))
    assert not any(jitter for _, _, jitter in arms.asked)


def test_a_twin_of_the_fp8_arm_that_overflows_fails():
    bad = arm(0.001)
    bad[1] = replace(bad[1], losses=[*bad[1].losses[:-1], math.nan])
    verdict_of(decided(fp8_twin=bad), Verdict.FAIL, "not finite from step 19 on", "seed 1")


# -- bit-equal curves -------------------------------------------------------------------------------------------------


def test_equal_losses_with_other_gradients_are_two_precisions():
    """A loss near 60 has one bfloat16 in each 0.25."""
    bf16 = arm(wobble=0.0)
    other = {s: replace(c, gradient_norms=[1.01] * 20) for s, c in bf16.items()}
    verdict_of(decided(other, bf16), Verdict.PASS)
    verdict_of(decided(bf16, bf16), Verdict.FAIL, "bit-equal")
