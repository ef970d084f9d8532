"""The loss question: what is asked of the arms, and what is decided of their curves, written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.evidence import StandIn, arm_ledger, curves, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.baselines.store import load_baseline
from pytest_fp8.codes import C, D
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.check import check_loss, judge_gap, loss_of
from pytest_fp8.questions.loss.evidence import (
    RUNS_OF_ONE_CURVE,
    START,
    Course,
    Curve,
    LayerCalls,
    Look,
    LossEvidence,
    Moved,
    ProductCount,
    is_cross_entropy,
)
from pytest_fp8.report.table import gap_of
from pytest_fp8.stats.loss import LOSS_MARGIN, MAX_LOSS_SEEDS, decide_loss, end_of, least_margin, loss_fall

BASELINES = Path(__file__).parents[2] / "baselines"
STEPS = 50
MOVES = {"up": Moved(4096, 0.99, 1.0), "down": Moved(4096, 0.98, 1.0), "norm": Moved(64, 0.0, 1.0)}
STEP = {"forward": ProductCount(14, 1), "backward": ProductCount(28, 2)}
COURSE = Course(
    rates=[{"lr": [1e-3], "weight_decay": [1e-3]}] * 5,
    stepped=[1] * 4,
    state={"up": "exp_avg bfloat16", "down": "exp_avg bfloat16"},
    modes={"": True, "drop": True},
    alone={"teacher.up": True, "frozen": False},
)


def arm(offset=0.0, moves=MOVES, first=STEP, last=STEP, **more):
    """An arm that learns, with weights that move and the products of its first and last step."""
    return {
        s: replace(c, movement=moves, first_products={} if s else first, last_products=last)
        for s, c in curves(offset, **more).items()
    }


def decided(fp8=None, bf16=None, **changes):
    return check_loss(LossEvidence(fp8 or arm(0.001), bf16 or arm(wobble=0.0), **changes))


def each(curves, **changes):
    return {seed: replace(curve, **changes) for seed, curve in curves.items()}


def one(seed, **changes):
    """FP8's curves, of which that of ``seed`` is changed."""
    fp8 = arm(0.001)
    return decided({**fp8, seed: replace(fp8[seed], **changes)})


def at(seed, step, field, value):
    """FP8's curves with another loss or norm in one step of a seed."""
    numbers = [*getattr(arm(0.001)[seed], field)]
    return one(seed, **{field: [*numbers[:step], value, *numbers[step + 1 :]]})


def after_the_first(curves, change):
    return {s: replace(c, losses=[c.losses[0], *map(change, c.losses[1:])]) for s, c in curves.items()}


def off(by, **kept):
    """FP8's losses, this far off after the first step."""
    return each(after_the_first(arm(0.001), lambda loss: loss + by), **kept)


def course(noisy=None, bf16=COURSE, **changes):
    """Arms of which FP8's trains otherwise; ``noisy``: BF16's course with noise."""
    more = {"noisy": each(arm(wobble=0.0), course=noisy)} if noisy else {}
    return decided(each(arm(0.001), course=replace(COURSE, **changes)), each(arm(wobble=0.0), course=bf16), **more)


def moves(*, reference=MOVES, **changes):
    return decided(arm(0.001, moves={**reference, **changes}), arm(wobble=0.0, moves=reference))


def still(name, reference):
    """A weight that moves in the reference alone."""
    return moves(reference={**MOVES, name: reference}, **{name: replace(reference, moved=0.0)})


def slow(moved, **more):
    return moves(reference={**dict.fromkeys(MOVES, moved), **more})


def of_losses(losses, norm=1.0, seeds=3):
    """Curves of ``losses(seed, step)``."""
    return {s: Curve(s, [losses(s, t) for t in range(STEPS)], [norm + s] * STEPS) for s in range(seeds)}


def flat(slope=0.0):
    """Arms whose losses scatter by 0.05 about a line."""
    draws = np.random.default_rng(3).normal(0, 0.05, (3, STEPS))
    arms = [of_losses(lambda s, t, o=o: 2.3 + o * (1 + s / 9) + draws[s][t] - slope * t, 1 + o) for o in (0.0005, 0.0)]
    return decided(*arms)


def signed(offset=0.0, noise=0.3):
    """Curves about zero, as a policy gradient's or a critic's are."""
    return of_losses(lambda s, t: 0.004 if not t else noise * np.cos(2.2 * t + s) + offset, 1 + offset, seeds=4)


def falling(end, factor=1.0, wobble=0.0, start=1.0, seeds=4):
    """Curves from ``start`` to ``end``; ``factor`` and ``wobble`` (a share of the end, another for each seed) act on
    what comes after the first step."""
    path = np.geomspace(start, end, STEPS)
    return of_losses(lambda s, t: path[t] * (factor + wobble * (s - 1.4) if t else 1.0), 1.0 + factor, seeds)


def noisy(reference, by):
    """The reference's curves with noise, which end off by this share to either side."""
    return {s: after_the_first({s: c}, lambda x, s=s: x * (1 + by * (-1) ** s))[s] for s, c in reference.items()}


def gap(end, factor, noise=None, wobble=0.01, **more):
    """Curves that end ``factor`` times as high; ``noise``: by which share noise moves the reference's end."""
    reference = falling(end, **more)
    given = {"noisy": noisy(reference, noise)} if noise is not None else {}
    return decided(falling(end, factor, wobble, **more), reference, **given)


def diverging():
    """A reference whose loss rises by seven powers of ten."""
    rises = [0.8 * 10 ** min(t, 7) for t in range(STEPS)]
    fp8, bf16, moved = (of_losses(lambda s, t, b=b: rises[t] * (1 + 0.01 * s + b), 1 + b) for b in (1e-4, 0.0, 0.02))
    return decided(fp8, bf16, noisy=moved)


def about_zero():
    """An actor's and critic's sum, which learns: shares of it say nothing."""
    reference = of_losses(lambda s, t: 2 - 4 * t / STEPS + 0.01 * s, seeds=4)
    fp8 = {s: after_the_first({s: c}, lambda x, s=s: x + 0.05 + 0.001 * s)[s] for s, c in reference.items()}
    return decided(fp8, reference, noisy=after_the_first(reference, lambda x: x + 0.04))


def to_zero():
    reference = of_losses(lambda s, t: max(1.0 - 0.1 * t, 0.0))
    return decided({s: Curve(s, [1.001, *c.losses[1:]], [1.1] * STEPS) for s, c in reference.items()}, reference)


def calls(fp8, other):
    return one(1, calls=LayerCalls(fp8, other))


def products(forward, backward):
    """The products of one seed's last step, in FP8 and others."""
    last = {"forward": forward, "backward": backward}
    return one(2, last_products={phase: ProductCount(*count) for phase, count in last.items() if count})


def looks(*errors, share=0.97, rough=100.0):
    """``share``: of the error of FP8 at its finest, one for all or one for each; ``rough``: of that at its coarsest."""
    shares = share if isinstance(share, list) else [share] * len(errors)
    seen = [Look(step, error, shares[step], 1.0 if error <= 0.01 else rough) for step, error in enumerate(errors)]
    return one(1, calls=LayerCalls([1] * 20, [0] * 20, {"up": seen}))


LITTLE = {"up": Moved(10**6, 0.05, 1.0), "head": Moved(10**4, 0.9, 1.0)}
EXACT_ONCE = [*[0.97] * 5, 0.003, 1.4, 1.4]
WRONG_ONCE = [*[0.001] * 6, 0.4, *[0.001] * 6]


def rates(name, value):
    """Those of the course, of which one goes apart after two steps."""
    return [*COURSE.rates[:2], *[{**COURSE.rates[0], name: [value]}] * 3]


RATE = Course(rates=[{"lr": [1e-3]}, {"lr": [1e-4]}])


def started(*by, noise=0.0, kept=0.0, higher=0.0, **changes):
    """Arms whose reference is trained again from its start, ``by`` off in each step; noise moves that start by
    ``noise`` to either side of where it is then, which is ``kept`` off."""
    fp8, bf16 = (each(arm, data_at_start=5, course=RATE) for arm in (curves(0.001 + higher), curves(wobble=0.0)))
    first = bf16[0].losses[:START]
    again = replace(bf16[0], losses=[x + o for x, o in zip(first, by or [0.0] * START, strict=True)], **changes)
    starts = [[x + kept + side * noise for x in first] for side in (-1, 1, 1, -1)]
    return LossEvidence(fp8, bf16, again=again, noisy_starts=starts if noise else ())


def again(*by, **given):
    return check_loss(started(*by, **given))


PASS, FAIL, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INVALID
INCONCLUSIVE, NOT_EXERCISED = Verdict.INCONCLUSIVE, Verdict.NOT_EXERCISED
FOUND = [  # evidence, verdict, code, what the message says besides
    # Each curve by itself, and both arms' beside each other.
    (lambda: at(1, 12, "losses", math.nan), FAIL, C.NOT_FINITE, "loss = nan at step 12, seed 1"),
    (lambda: at(0, 1, "gradient_norms", math.inf), FAIL, C.NOT_FINITE, "gradient norm = inf"),
    (lambda: decided(bf16=off(math.nan)), INVALID, C.REFERENCE_NOT_FINITE, "from step 1"),
    (lambda: decided(arm(wobble=0.0)), FAIL, C.BIT_EQUAL, "3 seeds"),
    (lambda: decided(each(arm(0.5), data=1)), FAIL, D.OTHER_DATA, "00000001 (FP8)"),
    (lambda: decided(*[each(of_losses(lambda s, t: 2.28), eps=2**-7)] * 2), INVALID, C.CONSTANT, "2.28 in all"),
    # Learning.
    (lambda: decided(off(0.2, movement={**MOVES, "down": Moved(4096, 0.0, 1.0)})), FAIL, C.WEIGHTS_STAND_STILL, "1 of"),
    (lambda: slow(Moved(10**6, 0.077, 1.0)), NOT_EXERCISED, C.SMALL_STEPS, "7.7% after 20 steps"),
    (lambda: slow(Moved(10**6, 0.0, 0.0)), NOT_EXERCISED, C.SMALL_STEPS, "0.0%"),
    (flat, NOT_EXERCISED, C.NOTHING_LEARNT, "by 0.0"),
    (lambda: decided(signed(0.05), signed(), noisy=signed(0.1)), NOT_EXERCISED, C.NOTHING_LEARNT, "falls"),
    (diverging, NOT_EXERCISED, C.NOTHING_LEARNT, "rises"),
    # The course of training.
    (lambda: course(stepped=[1, 0, 1, 1]), INVALID, D.OTHER_STEPS, "in training step 1 1 in BF16"),
    (lambda: course(rates=rates("lr", 2e-3)), INVALID, D.OTHER_RATES, "after 2 training steps lr 0.001"),
    (lambda: course(rates=rates("weight_decay", 0.1)), INVALID, D.OTHER_RATES, "steps weight_decay 0.001"),
    (lambda: course(state={}), INVALID, D.OTHER_OPTIMIZER_STATE, "no tensor; so for up, down"),
    (lambda: course(state={"up": "master float32"}), INVALID, D.OTHER_OPTIMIZER_STATE, "master float32"),
    (lambda: course(modes={"": True, "drop": False}), INVALID, D.OTHER_MODE, "eval mode in FP8: drop"),
    (lambda: course(left=["norm"]), INVALID, D.GRADIENTS_LEFT, "left in FP8: norm"),
    (lambda: course(alone={**COURSE.alone, "teacher.up": False}), FAIL, D.STANDS_STILL, "teacher.up"),
    (lambda: course(alone={**COURSE.alone, "frozen": True}), FAIL, D.FROZEN_MOVES, "frozen"),
    # A reference that keeps something from one curve for the next; it comes before a gap that comes of it.
    (lambda: again(data_at_start=7), INVALID, C.NOT_ANEW, "checksum 00000007"),
    (lambda: again(course=Course(rates=[{"lr": [1e-4]}])), INVALID, C.NOT_ANEW, "0.0001, when"),
    (lambda: again(0.0, 0.03, 0.05, 0.04, noise=0.004, kept=0.04, higher=0.2), INVALID, C.NOT_ANEW, "0.05 apart"),
    # FP8 that is off: in the last step of a seed, its backward pass alone, one step, one layer.
    (lambda: products((0, 15), (0, 30)), FAIL, C.FP8_LOST, "0 in FP8 and 15 others in step 19, seed 2"),
    (lambda: products((14, 1), None), FAIL, C.FP8_LOST, "0 in FP8 and 0 others in step 19"),
    (lambda: calls([14] * 18 + [13] * 2, [0] * 18 + [1] * 2), FAIL, C.FP8_LOST, "step 18, seed 1; fewer in FP8 in 2"),
    (lambda: looks(*[0.001] * 8, share=EXACT_ONCE), FAIL, C.TOO_EXACT, "0.3% of that error in step 5"),
    (lambda: looks(*WRONG_ONCE), FAIL, C.RARE_PRODUCT, "40.0% in step 6, seed 1; 1 of 13"),
    (lambda: looks(*[0.001] * 6, math.nan), FAIL, C.RARE_PRODUCT, "nan% in step 6"),
    # The gap at the end.
    (lambda: decided(off(0.2)), FAIL, C.HIGHER, "nats +-"),
    (lambda: decided(off(0.2, movement=LITTLE), arm(wobble=0.0, moves=LITTLE)), FAIL, C.HIGHER, ""),
    (lambda: decided(arm(0.001, wobble=0.02)), INCONCLUSIVE, C.MORE_SEEDS, "of 3 seeds"),
    (lambda: gap(2.0, 0.965, wobble=0.001, start=4.0), INCONCLUSIVE, C.LOWER, ""),
    (lambda: gap(0.5, 4.0, math.nan), INCONCLUSIVE, C.TOO_NOISY, ""),
    (lambda: gap(0.5, 4.0, 0.5), FAIL, C.HIGHER, "at most a quarter"),
]


@pytest.mark.parametrize(("decision", "verdict", "code", "says"), FOUND, ids=[row[2].slug for row in FOUND])
def test_what_is_broken_is_named(decision, verdict, code, says):
    verdict_of(decision(), verdict, code, says)


def moved_with_one_seed(**changes):
    """Of BF16 with noise, and of FP8 with each."""
    noisy = each(arm(wobble=0.0), course=COURSE)
    noisy[2] = replace(noisy[2], course=replace(COURSE, **changes))
    fp8 = each(arm(0.001), course=replace(COURSE, **changes))
    return decided(fp8, each(arm(wobble=0.0), course=COURSE), noisy=noisy)


OWN_RATES = {"rates": [{"lr": [1e-3]}, *[{"lr": [2e-3]}] * 4]}
# A loss near 60 has one bfloat16 in each 0.25: equal losses with other norms are two precisions.
NORMS = each(arm(wobble=0.0), gradient_norms=[1.0] * 20)
SOUND = {
    "healthy": decided,
    "an expert rests with one seed": lambda: one(1, movement={**MOVES, "down": Moved(4096, 0.0, 0.0)}),
    "a weight of few elements stands still": lambda: still("norm", Moved(64, 0.9, 1.0)),
    "one that hardly moves in BF16": lambda: still("embed", Moved(10**5, 0.04, 1.0)),
    "both arms reach zero": to_zero,
    "equal losses": lambda: decided(each(NORMS, gradient_norms=[1.1] * 20), NORMS),
    "a schedule that looks at the loss sets rates": lambda: course(noisy=replace(COURSE, **OWN_RATES), **OWN_RATES),
    "and noise moves it with another seed": lambda: moved_with_one_seed(rates=OWN_RATES["rates"]),
    "a step that looks at the loss is skipped with one seed": lambda: moved_with_one_seed(stepped=[1, 0, 1, 1]),
    "gradients are cleared at a step's start": lambda: course(bf16=replace(COURSE, left=["up", "expert"]), left=["up"]),
    "a start with sums in another order": lambda: again(0.0, 0.001, -0.002, 0.001, noise=0.004),
    "a rate of the weights": lambda: again(course=Course(rates=[{"lr": [1e-3 * (1 + 2**-9)]}])),
    "values that take the digits of all others": lambda: looks(*WRONG_ONCE, rough=1.8),
    "a layer that does more than multiply": lambda: looks(*[0.3] * 6, 0.9, 0.9),
    "experts that rest in the last step": lambda: products((10, 1), (20, 2)),
    "a last step that was not watched": lambda: products(None, None),
    "a lower loss within noise": lambda: gap(2.0, 0.96, 0.02, wobble=0.001, start=4.0),
    "a loss about zero": about_zero,
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_arms_pass(name):
    verdict_of(SOUND[name](), PASS)


# -- the margin: a share of the loss, its type's spacing, or what noise of FP8's size does ----------------------------


@pytest.mark.parametrize(
    ("end", "nats", "eps", "least"),
    [
        (3.0, True, 0.0, 0.02),
        (0.5, True, 0.0, 0.01),
        (2000.0, True, 0.0, 4.0),
        (50.0, False, 0.0, 1.0),
        (46.0, True, 2.0**-7, 0.25),
    ],
    ids=["nats", "below 1", "a sum", "no cross-entropy", "bfloat16"],
)
def test_the_least_margin_is_in_nats_or_a_share_of_the_loss(end, nats, eps, least):
    assert least_margin(end_of([[2 * end, *[end] * 9]]), eps, nats) == pytest.approx(least)


@pytest.mark.parametrize(
    ("changes", "nats"),
    [({}, True), ({"operators": {"": {"mse_loss float32": 1}}}, False), ({"operators": {}, "watched": False}, True)],
)
def test_a_cross_entropy_is_known_by_what_the_step_executes(changes, nats):
    assert is_cross_entropy(arm_ledger(**changes)) is nats


@pytest.mark.parametrize(("factor", "verdict"), [(1.004, PASS), (1.3, FAIL)])
def test_of_a_loss_that_is_no_cross_entropy_the_verdict_does_not_depend_on_the_unit(factor, verdict):
    unit = 1e-6
    decision = decided(falling(0.5 * unit, factor, 0.001, 2 * unit), falling(0.5 * unit, start=2 * unit), nats=False)
    verdict_of(decision, verdict, "2.0% of the loss")
    assert decision.numbers["margin"] == pytest.approx(0.0104 * unit, rel=0.1)
    assert "nats" not in decision.message


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, PASS), (2.0, FAIL)])
def test_a_margin_has_room_for_what_noise_does_to_the_references_end(factor, verdict):
    """A squared error near zero."""
    end = 1e-7
    assert gap(end, factor, wobble=0.001).verdict is FAIL
    decision = gap(end, factor, 0.06, wobble=0.001)
    verdict_of(decision, verdict, "by which noise of FP8's size moves BF16's own end")
    assert decision.numbers["margin"] == pytest.approx(0.18 * end_of([falling(end)[0].losses]), rel=0.01)


def test_no_sound_case_on_record_is_called_too_low_or_too_high():
    """Their noise was not measured: the least margin alone, which is the narrowest."""
    scales = {"own.moe": 0.208}
    found = []
    for path in sorted(BASELINES.rglob("[!_]*.json")):
        for session in load_baseline(path).sessions:
            if gaps := session.metrics.get("loss_gap"):
                judged = decide_loss(gaps, LOSS_MARGIN * scales.get(path.stem.partition("-")[0], 1.0))
                found.append((path.stem, judged.below or judged.verdict is FAIL))
    assert len(found) > 100
    assert [name for name, wrong in found if wrong] == []


def test_a_loss_of_noise_is_taken_for_learning_as_rarely_as_it_says():
    rng = np.random.default_rng(1)
    seen = [loss_fall(2.3 + rng.normal(0, 0.05, (3, 40))).learns for _ in range(1000)]
    assert 0.01 < np.mean(seen) < 0.05


@pytest.mark.parametrize(("fall", "learning", "rising"), [(0.029, (0.4, 0.6), 0.01), (-0.1, (0.0, 0.001), 1.0)])
def test_one_curve_that_rises_ends_hardly_any_case_that_three_show_to_learn(fall, learning, rising):
    rng = np.random.default_rng(2)
    curves = [2.3 - np.linspace(0, fall, 40) * 1.25 + rng.normal(0, 0.05, (3, 40)) for _ in range(2000)]
    least, most = learning
    assert least <= np.mean([loss_fall(three).learns for three in curves]) <= most
    alone = np.mean([loss_fall(three[:1]).rises for three in curves])
    assert alone <= rising
    assert fall > 0 or alone > 0.9


def test_the_figures_are_of_the_gap_and_of_the_reference():
    figures = decided().figures
    assert (figures.seeds, figures.steps) == (3, 20)
    assert figures.moved > 0.97
    assert gap(2.0, 1.001, wobble=0.001, start=3.0).figures.margin == pytest.approx(0.02)
    small = decided(falling(0.001, wobble=0.001), falling(0.0003))
    assert gap_of(small.numbers) == "+0.0013 (<1.4e-05)", "a small gap is not shown as none"


# -- what is asked until the curves decide: seeds one by one, and noise where it is needed ----------------------------

SEEDS = [0, 1, 2]


class CurveArm:
    def __init__(self, name, losses, asked, **more):
        self.name, self.losses, self.asked, self.more = name, losses, asked, more

    def request(self, operation, seed, steps, jitter=False, watch=False, noise=None):
        assert operation == "curve"
        assert watch == (self.name == "fp8")
        self.asked.append((self.name, seed, steps, jitter, noise))
        losses = list(self.losses(seed, steps, jitter=jitter, noise=noise))
        return to_plain(Curve(seed, losses, [1.0 + (self.name == "fp8")] * steps, **self.more))


class CurvePair:
    """Arms whose losses two functions give, of ``seed`` and ``steps``, ``jitter`` and ``noise``; ``asked`` notes arm,
    seed and steps, and jitter and noise."""

    def __init__(self, fp8, bf16, seeds=3, **of_fp8):
        self.case = Case("own", "torchao", "tensorwise", emulated=True, seeds=seeds)
        self.asked = []
        self.fp8, self.bf16 = CurveArm("fp8", fp8, self.asked, **of_fp8), CurveArm("bf16", bf16, self.asked)

    def evidence(self):
        """What is asked of these arms until their curves decide."""
        arms = StandIn(self.case, self.bf16, self.fp8)
        return arms.run(lambda: loss_of(arms, nats=True, steps=0))

    def noisy(self):
        """(seed, steps) of the reference's curves with noise."""
        return [(seed, steps) for _, seed, steps, _, noise in self.asked if noise is not None]


def losses(gap=0.0, spread=0.02, noise=0.0):
    """Losses that fall from 5 nats, ``gap`` off after the first step and a little more with each seed; a noisy curve
    ends ``noise`` off to either side."""
    moved = noise

    def of(seed, steps, jitter, noise):
        end = gap * (1 + spread * seed) + (moved * (-1) ** seed if noise is not None else 0.0)
        return [5 + seed / 1e4 - 20 * t / 1000 + end * (t > 0) for t in range(steps)]

    return of


@pytest.mark.parametrize(
    ("gap", "noise", "verdict", "asked"),
    [
        (0.001, 0.05, PASS, []),
        (0.03, 0.0, FAIL, SEEDS),
        (0.03, 0.014, PASS, SEEDS),
        (-0.2, 0.0, INCONCLUSIVE, [*range(MAX_LOSS_SEEDS)]),
    ],
    ids=["within the least margin", "higher", "within noise", "lower"],
)
def test_noise_is_asked_of_the_reference_only_where_a_gap_does_not_pass_without(gap, noise, verdict, asked):
    arms = CurvePair(losses(gap), losses(noise=noise))
    assert judge_gap(arms.evidence()).verdict is verdict
    assert [seed for seed, steps in arms.noisy() if steps == arms.case.steps] == asked
    assert not any(jitter for *_, jitter, _ in arms.asked), "seeds that differ by themselves are moved by nothing"


@pytest.mark.parametrize("by", [0.0, 0.05], ids=["the same", "another"])
def test_the_reference_trains_its_first_steps_again_and_with_noise_where_these_differ(by):
    plain, trained = losses(), []

    def bf16(seed, steps, **how):
        trained.append(steps)
        another = by if trained.count(START) == 1 and steps == START else 0.0
        return [x + another * (t > 0) for t, x in enumerate(plain(seed, steps, **how))]

    arms = CurvePair(losses(0.001), bf16)
    evidence = arms.evidence()
    assert [(s, n) for name, s, n, _, noise in arms.asked if n == START and noise is None] == [(0, START)]
    assert arms.noisy() == [(0, START)] * (4 if by else 0)
    assert (check_loss(evidence).verdict is INVALID) is bool(by)


def test_no_further_seed_is_asked_after_one_that_none_can_mend():
    def broken(seed, steps, **how):
        return [*losses()(seed, steps, **how)[:-1], math.nan]

    for arms in (CurvePair(broken, losses()), CurvePair(losses(0.001), losses(), data=1)):
        assert len(arms.evidence().fp8) == 1


@pytest.mark.parametrize(
    ("falls", "apart", "higher", "looked_at"),
    [
        (0.02, 0.025, 0.0, 8),
        (0.02, 0.05, 0.0, 3),
        (0.0, 0.025, 0.0, 3),
        (0.0, 0.025, 0.05, 8),
        (-0.02, 0.005, 0.0, 1),
        (-0.02, 0.005, 0.05, 4),
    ],
    ids=["open", "too far apart", "learns nothing", "and FP8 may end higher", "rises", "rises, and FP8 ends higher"],
)
def test_seeds_that_decide_nothing_are_asked_while_further_ones_may(falls, apart, higher, looked_at):
    def arm(by, more):
        return lambda seed, steps, **how: [
            3 + seed / 1e4 - falls * t + (t > 0) * ((-1) ** seed * by + more) for t in range(steps)
        ]

    arms = CurvePair(arm(apart, higher), arm(0.0, 0.0))
    evidence = arms.evidence()
    assert len(evidence.fp8) == looked_at
    if falls <= 0 and not higher:
        assert check_loss(evidence).verdict is NOT_EXERCISED
        assert {steps for _, steps in arms.noisy()} <= {START}, "noise would change nothing"


def test_a_seed_that_shows_more_than_that_nothing_is_learnt_is_no_reason_to_end():
    """An expert that rests with one seed stands still in FP8 alone, and trains with another."""

    def rising(seed, steps, **how):
        return [3 + 0.02 * t + seed / 1e4 for t in range(steps)]

    moves = {"weight": Moved(1000, 1.0, 1.0)}
    arms = CurvePair(rising, rising, movement=moves)
    arms.bf16.more["movement"] = moves
    assert len(arms.evidence().fp8) == 1
    arms.fp8.more["movement"] = {"weight": Moved(1000, 0.0, 1.0)}
    assert len(arms.evidence().fp8) == 3


# -- seeds that all give one training run -----------------------------------------------------------------------------


def runs(gap, seeds):
    """Arms that train the same run whatever the seed, but for a rounding."""

    def losses(end):
        def of(seed, steps, jitter, noise):
            by = end + 0.001 * (1 + 20 * end) * (-1) ** seed * (1 + seed / 7) * jitter
            return [3 - (1 - by) * t / 40 for t in range(steps)]

        return of

    return CurvePair(losses(gap), losses(0.0), seeds)


@pytest.mark.parametrize(
    ("gap", "seeds", "runs_", "verdict", "says"),
    [
        (0.001, 4, RUNS_OF_ONE_CURVE, Verdict.PASS, "of 4 runs of one curve, one rounding apart"),
        (0.2, 4, RUNS_OF_ONE_CURVE, Verdict.FAIL, ""),
        # No seed is another training: there is no more to look at.
        (0.0225, 4, RUNS_OF_ONE_CURVE, Verdict.INCONCLUSIVE, "with torch's generators"),
        (0.0225, 2, 3, Verdict.INCONCLUSIVE, "not likely to decide"),
    ],
)
def test_equal_runs_are_told_from_one_run_with_both_arms_alike(gap, seeds, runs_, verdict, says):
    arms = runs(gap, seeds)
    evidence = arms.evidence()
    assert evidence.one_curve
    assert len({tuple(curve.losses) for curve in evidence.bf16.values()}) == len(evidence.bf16) == runs_
    # The FP8 arm begins its second curve before the reference's shows that it is the first.
    asked = {(arm, seed, jitter) for arm, seed, _, jitter, noise in arms.asked if arm == "fp8" or noise is not None}
    assert {(arm, seed) for arm, seed, jitter in asked if jitter is not (seed > 0)} == {("fp8", 1)}
    decision = check_loss(evidence)
    verdict_of(decision, verdict, says)
    assert decision.figures.seeds == 1


@pytest.mark.parametrize(("seeds", "moved"), [(1, []), (3, [1, 2])])
def test_where_arms_take_turns_the_reference_is_asked_first_and_moved_as_the_fp8_arm_is(monkeypatch, seeds, moved):
    monkeypatch.setattr(StandIn, "takes_turns", True)
    arms = runs(0.001, seeds)
    arms.evidence()
    first = arms.asked[: [name for name, *_ in arms.asked].index("fp8")]
    assert [seed for _, seed, _, jitter, _ in first if jitter] == moved
    assert {seed for _, seed, steps, *_ in first if steps == arms.case.steps} == set(range(seeds))
    assert (0, START) in [(seed, steps) for _, seed, steps, *_ in first]
