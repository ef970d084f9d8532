"""Activation checkpointing inside a model, in live arms: what is recomputed is seen, and is no evaluation."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.evidence import verdict_of
from helpers.loops import build, judge, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.codes import L

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_the_model_is_seen_without_being_declared(reentrant):
    decision = judge(serve(build=lambda: build(True, reentrant), step=loop(2)))
    assert decision.verdict is Verdict.PASS, decision.message
    # Two blocks in each of two micro-batches; torch ends a recomputation before its last product where it can.
    assert decision.numbers["roles"]["recompute"]["expected"] == 8
    assert decision.numbers["roles"]["recompute"]["fp8"] >= 4
    assert decision.numbers["fp8_share"] == 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_evaluation_in_the_loss_of_a_checkpointed_model_is_no_training(reentrant):
    def loss(model, x):
        import torch

        with torch.no_grad():
            target = model(x)
        return (model(x) - target.flip(0)).float().pow(2).mean()

    decision = judge(serve(build=lambda: build(True, reentrant), loss=loss))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["recompute"]["expected"] == 4


def test_a_recomputation_outside_fp8_is_found():
    def build_broken():
        import torch

        class HalfOff(torch.nn.Module):
            """Multiplies in high precision in the backward pass, as with a context that is not restored there."""

            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(32, 64)

            def forward(self, x):
                if torch._C._current_graph_task_id() != -1:
                    return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)
                return self.inner(x)

        model = build(True)
        for block in model.blocks:
            block.up = HalfOff()
        return model

    decision = judge(serve(build=build_broken, step=loop()))
    verdict_of(decision, Verdict.FAIL, L.RECOMPUTE_NOT_IN_FP8, "recompute of 2 of 5 layers", "bfloat16 by blocks.0.up")


def test_reentrant_checkpointing_of_the_whole_model_is_not_an_evaluation():
    def step(model, batch, optimizer, precision):
        import torch
        from torch.utils.checkpoint import checkpoint

        loss = checkpoint(model, batch.requires_grad_(), use_reentrant=True).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch[:16])
        return loss

    server = serve(step=step)
    decision = judge(server)
    assert server.logits(seed=0)
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["fprop"] == {"expected": 5, "fp8": 5}
    assert decision.numbers["roles"]["recompute"]["fp8"] == decision.numbers["roles"]["recompute"]["expected"] > 0
