"""The numerics question's check of gradients: which ones fail, and in which words; on evidence written by hand."""

import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, layers_evidence, verdict_of
from helpers.numerics import NAMES, evidence, gradients, judge, wrong
from helpers.stand_in import StandIn
from pytest_fp8 import Verdict
from pytest_fp8.codes import D, N
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.questions.numerics.evidence import HandedOn
from pytest_fp8.questions.numerics.gradients import with_further_draws
from pytest_fp8.recipes import WGRAD


@pytest.mark.parametrize(
    ("fp8", "says"),
    [
        (gradients(times=4.0), [N.GRADIENT_TIMES, "4 of 4 gradients", "multiplied by 4.0", "it is the first"]),
        (
            gradients(times={"up": 2.0, "enter": 2.0}),
            [N.GRADIENT_TIMES, "2 of 4 gradients", "the last right one in backward order is down"],
        ),
        (gradients(times={"down": 0.0}), [N.OTHER_GRADIENT, "down: 0.00 times"]),
        (gradients(off={"enter": 0.7}), [N.OTHER_GRADIENT, "enter: "]),
        (gradients(off={"up": 0.3}, times={"up": 0.96}), [N.OTHER_GRADIENT, "up: "]),
        (gradients(off={"up": 0.9}, times={"up": 1.5}), [N.OTHER_GRADIENT, "up: "]),
        (gradients(times={"up": 0.1}), [N.GRADIENT_TIMES, "up is multiplied by 0.10"]),
        (gradients(off={"up": 0.9}, times={"up": 0.1}), [N.OTHER_GRADIENT, "up: 0.10 times"]),
        (gradients(times={"enter": math.inf}), [N.OTHER_GRADIENT, "from enter on"]),
        (
            gradients(silent=["up"], sketches={n: gradients().sketches[n] for n in NAMES if n != "up"}),
            [N.OTHER_GRADIENT, "up: 0.00 times"],
        ),
        (gradients(off=0.7, random="other"), [D.OTHER_RANDOM_NUMBERS]),
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
        "other random numbers",
    ],
)
def test_a_wrong_gradient_is_named_where_the_error_begins(fp8, says):
    verdict_of(judge(fp8=fp8), Verdict.FAIL, *says)


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


def of(name, products=(), **changes):
    return judge(products=products, fp8=renamed(name, **changes), gradients=renamed(name, off=0.0), moved=renamed(name))


def test_what_the_step_shows_besides_is_the_cause():
    verdict_of(of("up.bias", times=0.0625), Verdict.FAIL, N.BIAS_GRADIENT, "up.bias")
    padded = wrong(role=WGRAD, gain=0.0, own_gain=0.0, own_sqnr=0.0, sqnr=0.0, underflow=0.75)
    verdict_of(of("up.weight", [padded], off=0.7), Verdict.FAIL, N.OUTLIER, "wgrad of up")


@pytest.mark.parametrize(("bf16", "verdict"), [("", Verdict.FAIL), ("a", Verdict.PASS)])
def test_gradients_that_ranks_keep_in_one_arm_alone_are_named(bf16, verdict):
    """In both arms they may be reduced later."""
    apart = gradients(apart="up: 1.00 on rank 0, 1.20 on rank 1")
    decision = judge(fp8=apart, gradients=gradients(off=0.0, apart=bf16))
    assert (decision.verdict, decision.code) == (verdict, None if bf16 else D.NOT_REDUCED)
    assert bool(bf16) == ("differ between the ranks in both arms" in decision.message)


@pytest.mark.parametrize("cosine", [0.1, 0.8])
def test_what_changes_a_gradient_after_its_product_is_named_first(cosine):
    """Another step's gradient, or one that is stored too coarsely."""
    found = evidence(
        fp8=renamed("up.weight", off=0.7), gradients=renamed("up.weight", off=0.0), moved=renamed("up.weight")
    )
    arms = {arm: [HandedOn("up", near, 1.0, 1.0)] for arm, near in (("fp8", cosine), ("bf16", 1.0))}
    given = {arm: replace(getattr(found, arm), handed_on=handed_on) for arm, handed_on in arms.items()}
    decision = check_numerics(CASE, replace(found, **given), layers_evidence())
    verdict_of(decision, Verdict.FAIL, N.GRADIENT_REPLACED)


def test_gradients_that_any_small_change_moves_decide_nothing():
    verdict_of(judge(fp8=gradients(off=0.9), moved=gradients(off=0.9)), Verdict.INCONCLUSIVE, N.TOO_SENSITIVE)


def test_sensitive_gradients_are_judged_by_their_factor():
    """As those of a 1B model with random weights, which moved weights change by half."""
    moved = gradients(off=0.5)
    sound = judge(fp8=gradients(off=0.4), moved=moved)
    verdict_of(sound, Verdict.PASS, "4 sensitive ones within a factor of 1 +-")
    twice = gradients(off=0.4, times={"up": 2.0, "enter": 2.0})
    verdict_of(judge(fp8=twice, moved=moved), Verdict.FAIL, "2 of 4 gradients", "up", "times BF16's")
    verdict_of(judge(fp8=gradients(times={"down": 0.0}), moved=moved), Verdict.FAIL, N.OTHER_GRADIENT)


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

    def __init__(self):
        self.asked = []

    def request(self, operation, of, draws, operands):
        self.asked.append(operation)
        return [to_plain(gradients(off=0.6)) for _ in range(draws + operands)]

    def drawn(self, seen):
        return StandIn(CASE, self).run(lambda: with_further_draws(CASE, seen))


def test_the_reference_is_asked_for_further_draws_where_a_gradient_looks_wrong():
    arms = Arms()
    assert not arms.drawn(evidence()).further
    assert not arms.asked
    seen = arms.drawn(evidence(fp8=gradients(off={"up": 0.5})))
    assert arms.asked == ["moved"]
    verdict_of(check_numerics(CASE, seen, layers_evidence()), Verdict.PASS)


def test_one_expert_whose_rows_a_small_change_moves_is_left_alone():
    flips = {"up": 0.6}
    verdict_of(judge(fp8=gradients(off=flips), moved=gradients(off=flips)), Verdict.PASS)


def test_a_gradient_that_moved_weights_change_by_most_of_it_is_not_judged_and_counted():
    """At 0.8 of a gradient the limit would be 3 to 4 times its length: nothing is found there."""
    far = gradients(off={"up": 3.5})
    decision = judge(fp8=far, moved=gradients(off={"up": 0.9}))
    verdict_of(decision, Verdict.PASS, "1 of 4 not judged")
    assert decision.numbers["not_judged"] == 1
    verdict_of(judge(fp8=far, moved=gradients(off={"up": 0.2})), Verdict.FAIL, "up")
    broken = gradients(times={"up": math.inf})
    verdict_of(judge(fp8=broken, moved=gradients(off={"up": 0.9})), Verdict.FAIL, N.OTHER_GRADIENT)
