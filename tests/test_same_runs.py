"""Seeds that all give one training run: weights that are loaded, batches that depend on their step alone."""

import pytest

pytest.importorskip("torchao")

from helpers.curve_pair import CurvePair
from helpers.evidence import verdict_of
from helpers.loops import CASE, serve
from pytest_fp8.case import Case
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import RUNS_OF_ONE_CURVE, Curve
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS, LossGap
from pytest_fp8.verdicts import Verdict

pytestmark = pytest.mark.slow


def build():
    """As many people write it: whatever the seed, the same weights."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def batch(step):
    import torch

    return torch.randn(32, 32, generator=torch.Generator().manual_seed(step))


def loss(model, rows):
    return (model(rows) - rows.sin()).float().square().mean()


def test_weights_that_a_build_seeds_are_moved_by_the_seed_in_both_arms_alike():
    servers = [serve(case, build=build, batch=batch, loss=loss) for case in (CASE, CASE.reference())]

    def losses(server, seed, jitter):
        return tuple(server.curve(seed, 4, jitter=jitter)["losses"])

    for server in servers:
        assert losses(server, 1, False) == losses(server, 0, False), "one run"
        moved = [losses(server, seed, True) for seed in (1, 2, 1)]
        assert moved[0] == moved[2] != moved[1]
    weights = []
    for server in servers:
        server.engine.restart(seed=3, jitter=True)
        weights.append([parameter.detach().float().clone() for parameter in server.engine.model.parameters()])
    assert all(fp8.equal(reference) for fp8, reference in zip(*weights, strict=True))


class Arm:
    """Trains the same run whatever the seed, but for a rounding."""

    def __init__(self, end, asked):
        self.end, self.asked = end, asked

    def request(self, operation, seed, steps, jitter=False, watch=False):
        self.asked.append((self.end, seed, jitter))
        end = self.end + 0.001 * (-1) ** seed * (1 + seed / 7) * jitter
        losses = [3 - (1 - end) * t / steps for t in range(steps)]
        return to_plain(Curve(seed, losses, [1.0 + self.end] * steps))


class Arms(CurvePair):
    def __init__(self, gap, seeds):
        super().__init__()
        self.case = Case("own", "torchao", "tensorwise", emulated=True, seeds=seeds)
        self.fp8, self.bf16 = Arm(gap, self.asked), Arm(0.0, self.asked)


@pytest.mark.parametrize(("gap", "verdict"), [(0.001, Verdict.PASS), (0.2, Verdict.FAIL)])
def test_equal_runs_are_told_from_one_run_with_both_arms_alike(gap, verdict):
    arms = Arms(gap, seeds=4)
    evidence = arms.evidence()
    found = judge_gap(evidence)
    assert found.verdict is verdict
    assert found.bound > 0
    assert len({tuple(curve.losses) for curve in evidence.bf16.values()}) == len(evidence.bf16)
    moved = [seed for end, seed, jitter in arms.asked if end == gap and jitter and seed]
    assert moved == sorted(evidence.fp8)[1:], "the FP8 arm once for each"
    assert [seed for end, seed, jitter in arms.asked if end == gap and not jitter] == [0], (
        "no seed that is no other run"
    )
    assert evidence.one_curve


def test_a_pass_claims_one_curve_and_asks_for_a_seed():
    evidence = Arms(0.001, seeds=4).evidence()
    decision = check_loss(evidence)
    verdict_of(decision, Verdict.PASS, "of one curve, run 4 times one rounding apart", "all seeds give this one curve")
    assert "seeds (" not in decision.headline
    assert decision.figures.seeds == 1


def test_looking_ends_early_where_no_seed_is_another_training():
    """A loss of no share of which anything can be said never decides."""
    arms = Arms(0.04, seeds=2)
    evidence = arms.evidence(lambda each: LossGap(0.0, 1.0, 0.5, Verdict.INCONCLUSIVE))
    assert len(evidence.bf16) == RUNS_OF_ONE_CURVE < MAX_LOSS_SEEDS
    decision = check_loss(evidence, gap=LossGap(0.0, 1.0, 0.5, Verdict.INCONCLUSIVE))
    verdict_of(decision, Verdict.INCONCLUSIVE, "draw in batch(step) with torch's generators", "seeds=8")


def test_runs_that_differ_are_asked_as_they_are():
    arms = Arms(0.001, seeds=4)
    arms.bf16.request = lambda operation, seed, steps, **_: to_plain(
        Curve(seed, [3 - t / steps + seed / 1e3 for t in range(steps)], [1.0] * steps)
    )
    arms.evidence(twin=False)
    assert not any(jitter for _, _, jitter in arms.asked)
