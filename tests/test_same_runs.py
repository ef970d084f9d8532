"""Seeds that all give one training run: weights that are loaded, batches that depend on their step alone."""

import pytest

pytest.importorskip("torchao")

from helpers.curve_pair import CurvePair
from helpers.evidence import verdict_of
from helpers.loops import CASE, serve
from pytest_fp8.questions.loss.check import check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import RUNS_OF_ONE_CURVE
from pytest_fp8.stats.loss import MAX_LOSS_SEEDS
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


def runs(gap, seeds):
    """Arms that train the same run whatever the seed, but for a rounding."""

    def losses(end):
        def of(seed, steps, jitter, noise):
            by = end + 0.001 * (1 + 20 * end) * (-1) ** seed * (1 + seed / 7) * jitter
            return [3 - (1 - by) * t / 40 for t in range(steps)]

        return of

    return CurvePair(losses(gap), losses(0.0), seeds)


@pytest.mark.parametrize(("gap", "verdict"), [(0.001, Verdict.PASS), (0.2, Verdict.FAIL)])
def test_equal_runs_are_told_from_one_run_with_both_arms_alike(gap, verdict):
    arms = runs(gap, seeds=4)
    evidence = arms.evidence()
    found = judge_gap(evidence)
    assert found.verdict is verdict
    assert found.bound > 0
    assert len({tuple(curve.losses) for curve in evidence.bf16.values()}) == len(evidence.bf16)
    moved = [(seed, jitter) for name, seed, _, jitter, _ in arms.asked if name == "fp8"]
    assert moved == [(0, False), (1, True), (2, True), (3, True)]
    assert evidence.one_curve


def test_a_pass_claims_one_curve_and_asks_for_a_seed():
    evidence = runs(0.001, seeds=4).evidence()
    decision = check_loss(evidence)
    verdict_of(decision, Verdict.PASS, "of 4 runs of one curve, one rounding apart")
    assert "seeds (" not in decision.headline
    assert decision.figures.seeds == 1


def test_looking_ends_early_where_no_seed_is_another_training():
    evidence = runs(0.0225, seeds=2).evidence()
    assert len(evidence.bf16) == RUNS_OF_ONE_CURVE < MAX_LOSS_SEEDS
    verdict_of(check_loss(evidence), Verdict.INCONCLUSIVE, "with torch's generators")
