"""The checks on evidence written by hand: each has the healthy case, and one broken in each way that it must name."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from helpers.evidence import CASE, SIZES, arm_ledger, curves, layers_evidence, loaded, saved, verdict_of
from pytest_fp8 import Case, Verdict
from pytest_fp8.plain import PlainDataError, from_plain, to_plain
from pytest_fp8.questions.layers.check import check_layers, counted
from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.memory import MemoryEvidence, Peak, StepMemory, check_memory
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence

HP = Case("1b", "torchao", "rowwise_with_gw_hp")
RECIPE = {"recipe": "delayed", **CASE.full_options}


def sessions(speedup):
    """Four stored sessions of four processes, all of this speedup."""
    return [[[math.log(speedup)] * 8] * 4] * 4


def test_layers_healthy():
    decision = check_layers(CASE, layers_evidence())
    verdict_of(decision, Verdict.PASS, "2 of 3 Linears")
    assert decision.numbers["roles"]["wgrad"] == {"expected": 2, "fp8": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"converted": [], "live_fp8": [], "skipped": dict.fromkeys(SIZES, "size: odd")}, "no layer was converted"),
        ({"live_fp8": ["q"]}, "not FP8: up"),
        ({"live_fp8": ["q", "up", "lm_head"]}, "lm_head left alone (head)"),
        ({"skipped": {}}, "neither converted nor left with a reason"),
        ({"dropped_behaviour": {"q": "a forward hook"}}, "q: a forward hook"),
        ({"recipes": {"q": {"recipe": "off"}}}, "FP8 was off inside the forward pass"),
        ({"recipes": {"q": {**RECIPE, "amax_compute_algo": "most_recent"}}}, "amax_compute_algo=max"),
        ({"calls": []}, "keeps references to the unconverted modules"),
        ({"calls": [], "products": []}, "does not call the model that it is given"),
    ],
)
def test_layers_broken(changes, says):
    verdict_of(check_layers(CASE, layers_evidence(**changes)), Verdict.FAIL, says)


@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_converted_but_not_executed_names_role_and_layer(role):
    decision = check_layers(CASE, layers_evidence(bf16=[("up", role)]))
    verdict_of(decision, Verdict.FAIL, f"{role} of 1 of 2 layers", "bfloat16: up")
    assert f"read the layer's {'forward' if role == 'fprop' else 'backward'}" in decision.next_step


def test_layers_that_are_off_in_one_of_two_micro_batches_are_told_as_calls():
    first, off = layers_evidence(), layers_evidence(bf16=[("q", "fprop"), ("up", "fprop")])
    calls = [*first.calls, *(replace(call, turn=1) for call in first.calls)]
    decision = check_layers(CASE, replace(first, calls=calls, products=[*first.products, *off.products]))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 4 calls", "the first micro-batch alone")


@pytest.mark.parametrize(
    ("gradients", "says"), [(["q.weight"], "lm_head.weight, up.weight"), (None, "dgrad of 1 of 2")]
)
def test_a_branch_that_is_cut_off_is_named_and_not_a_layer_whose_products_are_missed(gradients, says):
    """``up`` is cut off, and the one dgrad of two layers of equal sizes may be anybody's."""
    healthy = layers_evidence()
    absent = [p for p in healthy.products if p.phase == "forward" or p.extents != healthy.calls[0].expected("dgrad")]
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(**({"gradients": gradients} if gradients else {})), "torchao")
    decision = check_layers(CASE, layers_evidence(products=absent), ledgers=ledgers)
    verdict_of(decision, Verdict.FAIL, says)
    assert ("cut off from the loss" in decision.cause) == bool(gradients)


def test_a_forward_pass_in_high_precision_is_said_before_missing_gradients():
    ledgers = TwoLedgers(arm_ledger(), arm_ledger(gradients=["q.weight"]), "torchao")
    decision = check_layers(CASE, layers_evidence(bf16=[("up", "fprop")]), ledgers=ledgers)
    verdict_of(decision, Verdict.FAIL, "fprop of 1 of 2 layers")


def test_an_fp8_operator_on_a_bf16_kernel_is_not_fp8():
    decision = check_layers(CASE, layers_evidence(kernel="bf16_kernel_1x1"))
    verdict_of(decision, Verdict.FAIL, "fprop of 2 of 2 layers", "bfloat16 kernel")


def test_a_kernel_of_no_learned_family_is_inconclusive():
    verdict_of(
        check_layers(CASE, layers_evidence(kernel="cute_1x1")), Verdict.INCONCLUSIVE, "no learned family", "cute"
    )


def test_a_recipe_that_keeps_wgrad_in_high_precision_is_held_to_it():
    both = [("q", "wgrad"), ("up", "wgrad")]
    verdict_of(check_layers(HP, layers_evidence(bf16=both, case=HP)), Verdict.PASS)
    verdict_of(check_layers(HP, layers_evidence(case=HP)), Verdict.FAIL, "wgrad ran in FP8 although")


def test_less_fp8_than_in_the_baseline_fails():
    verdict_of(check_layers(CASE, layers_evidence(), baseline_share=[0.9]), Verdict.FAIL, "less of the step")


@pytest.mark.parametrize(("count", "says"), [("fp8_layers", "Linears"), ("fp8_dgrad", "dgrad products")])
def test_counts_are_exact(count, says):
    kept = {"fp8_layers": 2, "fp8_fprop": 2, "fp8_dgrad": 2, "fp8_wgrad": 2}
    assert counted(check_layers(CASE, layers_evidence()).numbers) == kept
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=kept), Verdict.PASS)
    more = {**kept, count: 3}
    verdict_of(check_layers(CASE, layers_evidence(), baseline_counts=more), Verdict.FAIL, f"fewer {says}", "exactly")


def loss_evidence(fp8=None, **changes):
    return replace(LossEvidence(fp8=fp8 or curves(0.001), bf16=curves(wobble=0.0), twin=curves(0.0)), **changes)


def test_loss_healthy():
    verdict_of(check_loss(loss_evidence()), Verdict.PASS, "3 seeds")


def test_nan_at_step_40_is_named_with_the_value_before():
    bad = curves(0.001, steps=50)
    bad[1] = Curve(1, [*bad[1].losses[:39], *[math.nan] * 11], bad[1].gradient_norms)
    decision = check_loss(LossEvidence(fp8=bad, bf16=curves(steps=50, wobble=0.0), twin=curves(steps=50)))
    verdict_of(decision, Verdict.FAIL, "not finite from step 39 on", "seed 1", f"{bad[1].losses[38]:.4f}")


def test_a_gradient_norm_that_is_not_finite_fails_too():
    bad = curves(0.001)
    bad[0] = Curve(0, bad[0].losses, [1.0, math.inf, *[1.0] * 18])
    verdict_of(check_loss(loss_evidence(bad)), Verdict.FAIL, "gradient norm is not finite from step 1")


def test_a_reference_that_diverges_is_invalid_not_fp8s_fault():
    bad = {s: Curve(s, [math.nan] * 20, [1.0] * 20) for s in range(3)}
    verdict_of(check_loss(loss_evidence(bf16=bad)), Verdict.INVALID, "BF16 arm's loss is not finite")


def test_bit_equal_curves_mean_fp8_was_off():
    verdict_of(check_loss(loss_evidence(curves(wobble=0.0))), Verdict.FAIL, "bit-equal", "FP8 was off")


def test_three_per_cent_of_drift_fails():
    drift = {
        s: Curve(s, [x * (1 + 0.03 * t / 19) for t, x in enumerate(c.losses)], c.gradient_norms)
        for s, c in curves(0.001).items()
    }
    verdict_of(check_loss(loss_evidence(drift)), Verdict.FAIL, "higher loss than BF16")


def test_other_data_shows_at_the_first_step():
    verdict_of(check_loss(loss_evidence(curves(0.5))), Verdict.FAIL, "very first step")


def test_seeds_that_disagree_are_inconclusive():
    far = {
        s: Curve(s, [x + (0.05 * s - 0.03 if t > 2 else 0.001) for t, x in enumerate(c.losses)], c.gradient_norms)
        for s, c in curves().items()
    }
    verdict_of(check_loss(loss_evidence(far)), Verdict.INCONCLUSIVE, "more seeds")


def timing(fp8=80.0, **changes):
    noise = [0.999, 1.001, 1.0, 1.002, 0.998, 1.0] * 2
    bf16, mine = [100 * x for x in noise], [fp8 * x for x in reversed(noise)]
    return replace(TimingEvidence(bf16=[bf16, bf16], fp8=[mine, mine]), **changes)


def test_speedup_against_floor_and_baseline():
    verdict_of(check_speedup(timing(), floor=1.0, tolerance=0.03), Verdict.PASS, "1.250x")
    verdict_of(check_speedup(timing(120), floor=1.0, tolerance=0.03), Verdict.FAIL, "not faster than the best BF16")
    slower = check_speedup(timing(), floor=None, tolerance=0.03, history=sessions(1.35))
    verdict_of(slower, Verdict.FAIL, "lost speed against BF16", "baseline 1.350x less 3%")
    verdict_of(check_speedup(timing(), floor=None, tolerance=0.03), Verdict.NOT_EXERCISED, "--fp8-update-baselines")


def test_a_young_baseline_gates_coarsely_and_says_so():
    [one] = sessions(1.25)[:1]
    decision = check_speedup(timing(), floor=None, tolerance=0.02, history=[one])
    verdict_of(decision, Verdict.PASS, "baseline 1.250x less 2.", "(its 1 session(s) cannot hold 2%)")
    assert decision.numbers["tolerance"] > 0.02
    assert decision.numbers["sessions"] == 1
    wide = check_speedup(timing(), floor=None, tolerance=0.05, history=[one])
    assert "cannot hold" not in wide.message


def test_an_undecided_change_is_blamed_on_sessions_where_these_differ_most():
    decision = check_speedup(timing(), floor=None, tolerance=0.02, history=sessions(1.27))
    verdict_of(decision, Verdict.INCONCLUSIVE, "sessions on other machines differ by 0.38%", "pytest-fp8 compare")


def test_a_gain_asks_for_a_new_baseline():
    faster = check_speedup(timing(), floor=1.0, tolerance=0.02, history=sessions(1.18))
    verdict_of(faster, Verdict.IMPROVED, "+5.9%", "update the baseline")
    assert faster.verdict.passes


def test_the_number_of_gated_cases_reaches_the_rule():
    alone, among_many = (
        check_speedup(timing(), floor=None, tolerance=0.02, history=sessions(1.29), cases=cases)
        for cases in (1, 10_000)
    )
    assert (alone.verdict, among_many.verdict) == (Verdict.FAIL, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strangers": [7]}, "another process used the GPU"),
        ({"throttles": ["hardware thermal"]}, "throttled"),
        (
            {"bf16_attention": {"efficient": ["fmha_cutlassF"]}, "fp8_attention": {"cudnn": ["cudnn_flash"]}},
            "different attention",
        ),
        ({"fp8_attention": {"flash": ["f"]}, "bf16_cudnn": 91900, "fp8_cudnn": 91400}, "two cuDNN libraries: 91900"),
    ],
)
def test_a_disturbed_measurement_is_invalid(changes, says):
    verdict_of(check_speedup(timing(**changes), floor=1.0, tolerance=0.03), Verdict.INVALID, says)


@pytest.mark.parametrize(
    ("stored", "verdict", "says"),
    [
        # BF16 takes 110 ms here.
        ([[100.0, 100.4]], Verdict.INVALID, "100.20 ms a step +-8%, as in 1 stored session"),
        ([[97.0], [100.2]], Verdict.INVALID, "97.00 to 100.20 ms a step +-8%, as in 2 stored session"),
        ([[120.4]], Verdict.INVALID, "reference is outside its own band"),
        ([[103.5]], Verdict.PASS, ""),
        ([[118.0]], Verdict.PASS, ""),
        ([[97.0], [104.0]], Verdict.PASS, ""),
    ],
)
def test_a_slowdown_of_both_arms_is_no_regression_of_fp8(stored, verdict, says):
    both = check_speedup(
        timing(88, bf16=[[110.0] * 12] * 2),
        floor=1.0,
        tolerance=0.03,
        history=sessions(1.25),
        baseline_reference_ms=stored,
    )
    verdict_of(both, verdict, says)


def test_a_loss_on_a_host_that_is_rather_slow_is_not_held_against_fp8():
    """A pause in both arms' steps on an H200: BF16 took 7.3 % longer, FP8 9.6 %. Nearer hosts say more."""

    def verdict(bf16, fp8, history=1.25):
        times = replace(timing(fp8), bf16=[[bf16] * 12] * 4, fp8=[*timing(fp8).fp8] * 2)
        return check_speedup(
            times, floor=1.0, tolerance=0.02, history=sessions(history), baseline_reference_ms=[[100.0]]
        )

    verdict_of(verdict(107.3, 1.096 * 80), Verdict.INVALID, "reference is outside its own band", "+-5%")
    verdict_of(verdict(106.0, 1.06 * 80), Verdict.PASS)
    for bf16, lost in ((103.0, 0.03), (107.3, 0.05), (107.3, 0.15), (94.0, 0.03), (94.0, 0.15)):
        verdict_of(verdict(bf16, bf16 / 1.25 / (1 - lost)), Verdict.FAIL, "lost speed against BF16")


HOSTS = [118.1, 120.2, 120.3, 120.5, 121.1, 121.7, 121.9, 122.1, 124.0, 125.1, 125.3]
"""Milliseconds of one and the same BF16 step of 1B on H200s: medians of sessions, in stored baselines and in a run."""


def test_no_healthy_host_is_outside_the_band_of_another():
    for here, stored in itertools.permutations(HOSTS, 2):
        speed = timing(here / 1.25, bf16=[[here] * 12] * 2)
        found = check_speedup(
            speed, floor=1.0, tolerance=0.03, history=sessions(1.25), baseline_reference_ms=[[stored]]
        )
        verdict_of(found, Verdict.PASS)


def memory(peak, resident=50, phase="forward"):
    return StepMemory(resident, {phase: Peak(peak, peak)}, peak_allocated=peak, peak_reserved=peak)


def test_memory():
    evidence = MemoryEvidence(bf16=memory(100), fp8=memory(90))
    verdict_of(check_memory(evidence, [0.9]), Verdict.PASS)
    verdict_of(check_memory(evidence), Verdict.NOT_EXERCISED)
    large = check_memory(MemoryEvidence(bf16=memory(10 * 2**30), fp8=memory(9 * 2**30)), [0.9])
    assert [large.numbers[f"{arm}_peak_gib"] for arm in ("bf16", "fp8")] == [10.0, 9.0]
    assert "FP8 9.00 GiB (in forward), BF16 10.00 GiB" in large.message
    verdict_of(check_memory(replace(evidence, fp8=memory(80)), [0.9]), Verdict.IMPROVED, "update the baseline")
    verdict_of(check_memory(replace(evidence, fp8=memory(166)), [0.9]), Verdict.FAIL, "more memory against BF16")


def test_activations_are_described_and_decide_nothing():
    less = check_memory(MemoryEvidence(bf16=memory(100), fp8=memory(90, resident=70)), [0.9])
    verdict_of(less, Verdict.PASS)
    assert less.numbers["activation_ratio"] == pytest.approx(20 / 50)
    no_forward = memory(90, phase="backward")
    assert "activation_ratio" not in check_memory(MemoryEvidence(memory(100), no_forward), [0.9]).numbers


# -- causes that the catalogue of controls asks for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({"asked": "fp8", "accelerate": ""}, "nothing in this program reads it"),
        ({"asked": "fp8", "accelerate": "bf16"}, "bf16=True of the Trainer wins over it"),
        ({"asked": "fp8", "accelerate": "fp8"}, "prepare() was not given this model"),
        ({}, "FP8 was asked for where nothing reads it"),
    ],
)
def test_nothing_converted_names_who_dropped_it(switches, says):
    verdict_of(check_layers(CASE, layers_evidence(live_fp8=[], switches=switches)), Verdict.FAIL, says)


def test_another_librarys_layers_are_named_as_such():
    kinds = dict.fromkeys(SIZES, "torchao.float8.float8_linear.Float8Linear")
    decision = check_layers(CASE, layers_evidence(live_fp8=[], kinds=kinds))
    verdict_of(decision, Verdict.FAIL, "another library's: torchao", "both libraries are installed")


def test_eval_mode_is_the_cause_only_where_layers_are_in_it():
    off = [(name, "fprop") for name in ("q", "up")]
    verdict_of(check_layers(CASE, layers_evidence(bf16=off, in_eval=["q"])), Verdict.FAIL, "eval() switched FP8 off: 1")
    assert "eval()" not in check_layers(CASE, layers_evidence(bf16=off)).message


def test_an_amax_history_that_stands_still_is_named():
    decision = check_layers(CASE, layers_evidence(stale_amax=["q", "up"]))
    verdict_of(decision, Verdict.FAIL, "amax history of 2 layers does not change", "never updated")


def test_recomputation_that_torch_ended_early_is_no_finding():
    case = Case("1b", "torchao", "tensorwise", activation_checkpointing=True)
    healthy = layers_evidence(case=case, recompute=True)
    calls = healthy.calls
    again = [
        Product("recompute", *c.expected("fprop")[1:], FP8, "mm", "fp8_kernel_1x1") for c in calls if c.name == "q"
    ]
    evidence = replace(healthy, products=[*healthy.products, *again])
    verdict_of(check_layers(case, evidence), Verdict.PASS)
    broken = [replace(product, kind="bfloat16") for product in again]
    decision = check_layers(case, replace(evidence, products=[*healthy.products, *broken]))
    verdict_of(decision, Verdict.FAIL, "recompute of 1 of 2 layers", "outside the precision context")


def test_different_data_is_named_before_its_consequences():
    other = {s: replace(curve, data=1 + s) for s, curve in curves(0.5).items()}
    verdict_of(check_loss(loss_evidence(other)), Verdict.FAIL, "trained on different data", "00000001 (FP8)")


@pytest.mark.parametrize(("compiled", "says"), [(False, "was not compiled"), (True, "too small")])
def test_slower_than_bf16_names_a_missing_compile(compiled, says):
    decision = check_speedup(timing(120, fp8_compiled=compiled), floor=1.0, tolerance=0.03)
    verdict_of(decision, Verdict.FAIL, "not faster than the best BF16", says)


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (layers_evidence(), "dropped_behaviour"),
        (layers_evidence(), "foreign"),
        (arm_ledger(), "waits"),
        (curves()[0], "movement"),
        (saved(), "untied"),
        (loaded(), "digests"),
    ],
)
def test_what_an_arm_does_not_say_is_never_taken_as_healthy(record, key):
    answer = to_plain(record)
    assert to_plain(from_plain(type(record), answer)) == answer
    del answer[key]
    with pytest.raises(PlainDataError, match=f"{type(record).__name__} lacks '{key}'"):
        from_plain(type(record), answer)
