"""Recomputation that computes something else than the first forward pass is named; a sound one is left alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.evidence import CASE as OTHER_CASE
from helpers.evidence import arm_ledger, layers_evidence, verdict_of
from helpers.loops import judge_both, ledgers, loop
from pytest_fp8 import Verdict
from pytest_fp8.codes import D
from pytest_fp8.questions.layers.check import check_layers
from pytest_fp8.questions.ledger.compare import compare, find_in_ledger
from pytest_fp8.questions.ledger.evidence import TwoLedgers

pytestmark = pytest.mark.slow


def dropping(inside=0.1, after=0.0, reentrant=False):
    """Two residual blocks that recompute themselves, with a dropout between their Linears, and one at their end."""

    def build():
        import torch
        from torch.nn.functional import dropout
        from torch.utils.checkpoint import checkpoint

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
                self.preserves = True

            def inner(self, x):
                hidden = dropout(torch.nn.functional.gelu(self.up(x)), inside, self.training)
                return dropout(self.down(hidden), after, self.training)

            def forward(self, x):
                return x + checkpoint(self.inner, x, use_reentrant=reentrant, preserve_rng_state=self.preserves)

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.enter = torch.nn.Linear(32, 32)
                self.blocks = torch.nn.ModuleList([Block(), Block()])

            def forward(self, x):
                x = self.enter(x)
                for block in self.blocks:
                    x = block(x)
                return x

        return Net()

    return build


def forgetting(model):
    """``convert`` after which the blocks do not preserve the random state."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    for block in model.blocks:
        block.preserves = False
    return model


def squares(model, x):
    return (model(x) - x).float().pow(2).mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_sound_recomputation_has_no_difference(reentrant):
    both = ledgers(build=dropping(0.02, after=0.2, reentrant=reentrant), step=loop(2, evaluate=True))
    assert compare(both) == []
    assert not both.fp8.recomputed_otherwise


@pytest.mark.parametrize(
    ("rates", "parts"),
    [((0.1, 0.0), {"loss": squares}), ((0.0, 0.1), {"step": loop(2)})],
    ids=["inside", "at the end, micro-batches"],
)
def test_another_mask_in_the_fp8_arm_is_named_with_who_draws_it(rates, parts):
    decision = judge_both(build=dropping(*rates), convert=forgetting, **parts)
    verdict_of(decision, Verdict.FAIL, D.RECOMPUTED_OTHERWISE, "blocks.1", "blocks.0")


def test_the_reference_alone_is_no_comparison():
    both = TwoLedgers(arm_ledger(recomputed_otherwise=["q"]), arm_ledger(), "torchao")
    for question in ("layers", "loss"):
        found = find_in_ledger(both, question)
        assert found.verdict is Verdict.INVALID
        assert found.code is D.RECOMPUTED_OTHERWISE


def test_both_arms_alike_is_said_in_the_pass():
    both = TwoLedgers(*(arm_ledger(recomputed_otherwise=["q"]) for _ in range(2)), OTHER_CASE.backend)
    decision = check_layers(OTHER_CASE, layers_evidence(), ledgers=both)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "recomputation computes something else than the first forward in both arms: q" in decision.headline
