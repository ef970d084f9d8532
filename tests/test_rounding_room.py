"""The reference is asked what rounding does to its last loss where a margin is too narrow, and nowhere else."""

from functools import partial

import pytest

from helpers.stand_in import StandIn
from pytest_fp8.case import Case
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.check import judge_gap
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.questions.loss.question import loss_of
from pytest_fp8.verdicts import Verdict

STEPS = 20
TWINS = [0.0] * 4
"""BF16 trains the same again."""


class Arms:
    """A reference whose last loss of 0.01 rises by 0.004 with moved weights."""

    def __init__(self, evidence):
        self.asked, self.evidence = [], evidence

    def request(self, operation, seed, **how):
        if operation == "moved_losses":
            self.asked.append((operation, seed))
            return [0.01, *[0.014] * how["draws"]]
        return to_plain((self.evidence.fp8 if "watch" in how else self.evidence.bf16)[seed])


def evidence(gap):
    """Four seeds of a squared error that falls to 0.01, FP8's by so much less."""
    bf16 = {s: [1 - 0.99 * t / (STEPS - 1) + 1e-4 * s for t in range(STEPS)] for s in range(4)}
    fp8 = {s: [x + gap * (1 + s / 50) for x in losses] for s, losses in bf16.items()}
    arms = [{s: Curve(s, losses, [1.0] * STEPS) for s, losses in arm.items()} for arm in (fp8, bf16)]
    return LossEvidence(arms[0], arms[1], arms[1], nats=False)


@pytest.mark.parametrize(
    ("gap", "verdict", "seeds"),
    [(0.0001, Verdict.PASS, []), (0.008, Verdict.PASS, [0, 1, 2]), (0.05, Verdict.FAIL, [0, 1, 2])],
    ids=["within the margin", "of rounding's size", "larger"],
)
def test_a_gap_of_roundings_size_passes_and_a_larger_one_fails(gap, verdict, seeds):
    arms = Arms(evidence(gap))
    judge = partial(judge_gap, frozen_margin=TWINS)
    pair = StandIn(Case("own", "torchao", "tensorwise", emulated=True, seeds=4), arms, arms)
    found = judge(pair.run(lambda: loss_of(pair, False, False, judge)))
    assert found.verdict is verdict
    assert arms.asked == [("moved_losses", seed) for seed in seeds]
    assert judge_gap(evidence(gap)).verdict is (Verdict.FAIL if seeds else Verdict.PASS), "without the room"
