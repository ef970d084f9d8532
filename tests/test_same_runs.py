"""Seeds that all give one training run: weights that are loaded, batches that depend on their step alone."""

import pytest

from pytest_fp8.case import Case
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.again import look_again
from pytest_fp8.questions.loss.check import judge_gap
from pytest_fp8.questions.loss.evidence import Curve, loss_looks
from pytest_fp8.verdicts import Verdict

MODEL = """
    import pytest
    import torch
    from pytest_fp8 import Workload

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

    def batch(step):
        return torch.randn(64, 64, generator=torch.Generator().manual_seed(step))

    def loss(model, rows):
        return (model(rows) - rows.sin()).float().square().mean()

    @pytest.fixture
    def fp8_workload():
        return Workload(build, batch, loss)

    @pytest.mark.fp8(emulated=True, loss_steps=20)
    def test_loss(fp8_pair):
        numbers = fp8_pair.assert_loss().numbers
        assert len(set(numbers["gaps"])) == numbers["seeds"] == 4
        assert 0 < numbers["bound"] < numbers["margin"]
        assert all(0 < abs(gap) < numbers["margin"] for gap in numbers["twin_gaps"]), numbers
"""


def test_a_build_that_seeds_itself_has_runs_one_rounding_apart(pytester):
    pytester.makepyfile(MODEL)
    pytester.runpytest("-p", "no:cacheprovider").assert_outcomes(passed=1)


class Arm:
    """Trains the same run whatever the seed, but for a rounding."""

    def __init__(self, end, asked):
        self.end, self.asked = end, asked

    def request(self, operation, seed, steps, jitter=False, watch=False):
        self.asked.append((self.end, seed, jitter))
        end = self.end + 0.001 * (-1) ** seed * (1 + seed / 7) * jitter
        losses = [3 - (1 - end) * t / steps for t in range(steps)]
        return to_plain(Curve(seed, losses, [1.0 + self.end] * steps))


class Arms:
    def __init__(self, gap, seeds):
        self.case = Case("own", "torchao", "tensorwise", emulated=True, loss_seeds=seeds)
        self.asked, self.kept = [], {}
        self.fp8, self.bf16 = Arm(gap, self.asked), Arm(0.0, self.asked)

    def shared(self, what, ask):
        if what not in self.kept:
            self.kept[what] = ask()
        return self.kept[what]

    once = shared

    def beside(self, operation, reference, **arguments):
        return self.fp8.request(operation, **arguments), reference()


@pytest.mark.parametrize(("gap", "verdict"), [(0.001, Verdict.PASS), (0.2, Verdict.FAIL)])
def test_equal_runs_are_told_from_one_run_with_both_arms_alike(gap, verdict):
    arms = Arms(gap, seeds=4)
    evidence, found = look_again(loss_looks(arms, twin=True), judge_gap)
    assert found.verdict is verdict
    assert found.bound > 0
    assert len({tuple(curve.losses) for curve in evidence.bf16.values()}) == len(evidence.bf16)
    moved = [seed for end, seed, jitter in arms.asked if end == gap and jitter and seed]
    assert moved == sorted(evidence.fp8)[1:], "the FP8 arm once for each"
    assert [seed for end, seed, jitter in arms.asked if end == gap and not jitter] == [0, 1], "seed 1 told them apart"


def test_runs_that_differ_are_asked_as_they_are():
    arms = Arms(0.001, seeds=4)
    arms.bf16.request = lambda operation, seed, steps, **_: to_plain(
        Curve(seed, [3 - t / steps + seed / 1e3 for t in range(steps)], [1.0] * steps)
    )
    look_again(loss_looks(arms, twin=False), judge_gap)
    assert not any(jitter for _, _, jitter in arms.asked)
