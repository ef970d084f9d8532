"""Recomputation that computes something else than the first forward pass is named; a sound one is left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.evidence import CASE as OTHER_CASE
from helpers.evidence import arm_ledger, layers_evidence
from helpers.loops import CASE, judge_both, ledgers, loop
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


RATES = [{"inside": 0.1}, {"inside": 0.5, "after": 0.2}, {"inside": 0.02}]


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rates", RATES, ids=str)
def test_sound_recomputation_has_no_difference(reentrant, rates):
    build = dropping(**rates, reentrant=reentrant)
    for parts in ({"loss": squares}, {"step": loop(2, evaluate=True)}):
        both = ledgers(replace(CASE, recipe="rowwise"), build=build, **parts)
        assert compare(both) == []
        assert not both.fp8.recomputed_otherwise


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("parts", [{"loss": squares}, {"step": loop(2)}], ids=["loss", "micro-batches"])
def test_another_mask_in_the_fp8_arm_is_named_with_the_layer(reentrant, parts):
    decision = judge_both(build=dropping(reentrant=reentrant), convert=forgetting, **parts)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert decision.code is D.RECOMPUTED_OTHERWISE
    assert "blocks.1.down, blocks.0.down" in decision.message
    assert "up" not in decision.message.partition("seen:")[2].partition(";")[0]


def test_a_mask_that_no_layer_sees_is_named_by_who_draws_it():
    both = ledgers(build=dropping(inside=0.0, after=0.1), convert=forgetting, loss=squares)
    found = find_in_ledger(both, "loss")
    assert found.verdict is Verdict.FAIL
    assert found.code is D.RECOMPUTED_OTHERWISE
    assert "blocks.1" in found.seen


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
