"""A reference that several cases share carries checkpoints for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

import torch
from torch import nn

from helpers.carried import CASE, LivePair
from pytest_fp8 import Verdict, Workload
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.checkpoints.check import check_checkpoints

pytestmark = pytest.mark.slow


class Turned(nn.Module):
    """Random numbers of its own that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.randn(64), persistent=False)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.two((self.one(x) * self.rates).sin())


def apart(model, x):
    return (model(x) - x).float().square().mean()


def test_what_it_answered_in_between_does_not_matter(tmp_path):
    workload = Workload(build=Turned, batch=lambda step: torch.randn(32, 64), loss=apart)
    pair = LivePair(replace(CASE, checkpoint_formats=("safetensors",)), tmp_path, workload)
    kept = {}
    pair.shared = lambda what, ask: kept[what] if what in kept else kept.setdefault(what, ask())
    for _ in range(2):
        decision = check_checkpoints(transfers_of(pair))
        assert decision.verdict is Verdict.PASS, decision.message
        pair.bf16.request("curve", seed=1, steps=1)


@pytest.mark.parametrize("resume", [True, False])
def test_scaling_state_that_is_lost_fails_also_where_a_case_does_not_resume(tmp_path, resume):
    """As 8B under FSDP2 does not: its scales matter as much. The arm here keeps none, and says that it lost some."""
    workload = Workload(build=Turned, batch=lambda step: torch.randn(32, 64), loss=apart)
    pair = LivePair(replace(CASE, checkpoint_formats=("dcp",), resume=resume), tmp_path, workload)
    answers = pair.fp8.request

    def request(operation, **arguments):
        if operation == "carry_scales":
            kept, new = {"one scale": 1}, {"one scale": 0}
            return {
                "stored": kept,
                "reset": new,
                "loaded": new,
                "fresh": {},
                "no_place": 0,
                "refused": "",
                "failed": "",
            }
        answer = answers(operation, **arguments)
        return {**answer, "scaling_state": ["one._extra_state"]} if operation == "save" else answer

    pair.fp8.request = request
    decision = check_checkpoints(transfers_of(pair))
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "scaling state is lost where FP8 goes on in FP8" in decision.message
