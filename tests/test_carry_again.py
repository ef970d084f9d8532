"""A reference that several cases share carries checkpoints for each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

import torch
from torch import nn

from helpers.carried import CASE, LivePair
from pytest_fp8 import Verdict, Workload
from pytest_fp8.questions.checkpoints.carry import _carry_both_ways
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
    for _ in range(2):
        decision = check_checkpoints(pair.run(lambda: _carry_both_ways(pair)))
        assert decision.verdict is Verdict.PASS, decision.message
        pair.bf16.request("curve", seed=1, steps=1)
