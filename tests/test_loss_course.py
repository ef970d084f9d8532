"""What a curve shows beside its losses: optimizer steps, rates, state, gradients left over, tensors moved by hand."""

from dataclasses import replace

import pytest

from helpers.evidence import curves, verdict_of
from pytest_fp8.questions.loss.check import check_loss
from pytest_fp8.questions.loss.course import trained_otherwise
from pytest_fp8.questions.loss.evidence import Course, Curve, LossEvidence
from pytest_fp8.verdicts import Verdict

SOUND = Course(
    rates=[[1e-3]] * 5,
    stepped=[1] * 4,
    state={"up": "exp_avg bfloat16", "down": "exp_avg bfloat16"},
    alone={"teacher.up": True, "frozen": False},
)


def compared(fp8=SOUND, bf16=SOUND, noisy=SOUND):
    arms = [{seed: Curve(seed, [1.0], [1.0], course=course) for seed in (0, 1)} for course in (fp8, bf16, noisy)]
    return trained_otherwise(LossEvidence(*arms))


def test_arms_that_train_alike_are_left_alone():
    assert compared() is None


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"stepped": [1, 0, 1, 1]}, Verdict.INVALID, ["do not step equally often", "in training step 1 1 in BF16"]),
        (
            {"rates": [[1e-3], [1e-3], [2e-3], [2e-3], [2e-3]]},
            Verdict.INVALID,
            ["go apart", "after 2 training steps 0.001 in BF16"],
        ),
        (
            {"state": {**SOUND.state, "up": "exp_avg bfloat16, master float32"}},
            Verdict.INVALID,
            ["master float32", "up"],
        ),
        ({"left": ["norm"]}, Verdict.INVALID, ["left over after the steps of the FP8 arm", "norm"]),
        ({"alone": {**SOUND.alone, "teacher.up": False}}, Verdict.FAIL, ["stand still in the FP8 arm", "teacher.up"]),
        ({"alone": {**SOUND.alone, "frozen": True}}, Verdict.FAIL, ["move in the FP8 arm alone", "frozen"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arms_that_train_otherwise_are_named(changes, verdict, words):
    found = compared(fp8=replace(SOUND, **changes))
    assert found is not None
    verdict_of(found, verdict, *words)


def test_an_arm_that_trains_otherwise_is_no_pass_however_close_its_loss():
    arms = [curves(0.001), curves(wobble=0.0)]
    for arm, course in zip(arms, (replace(SOUND, stepped=[1, 0, 1, 1]), SOUND), strict=True):
        arm.update({seed: replace(curve, course=course) for seed, curve in arm.items()})
    verdict_of(check_loss(LossEvidence(*arms)), Verdict.INVALID, "do not step equally often")


@pytest.mark.parametrize(
    "changes", [{"stepped": [1, 0, 1, 1]}, {"rates": [[1e-3], *[[2e-3]] * 4]}], ids=lambda value: next(iter(value))
)
def test_what_differs_between_bf16_and_itself_is_left_alone(changes):
    """A schedule that looks at the loss goes its own way in each run."""
    assert compared(fp8=replace(SOUND, **changes), noisy=replace(SOUND, **changes)) is None


def test_a_buffer_of_the_fp8_layers_alone_is_none_that_moved():
    assert compared(fp8=replace(SOUND, alone={**SOUND.alone, "up.scale": True})) is None


def test_a_step_that_clears_gradients_at_its_start_leaves_all_of_them():
    assert compared(fp8=replace(SOUND, left=["up"]), bf16=replace(SOUND, left=["up", "expert"])) is None
