"""What a model keeps besides its weights is put back: also lists, dicts, sets, queues, and buffers of convert()."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from helpers.loops import serve
from pytest_fp8.worker.state.snapshot import Snapshot

pytestmark = pytest.mark.slow


def square(model, rows):
    return model(rows).float().square().mean()


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses, self.queue, self.seen = [torch.ones(2)], deque([1], maxlen=2), {3}
        self.counts, self.by_kind = Counter(train=1), defaultdict(list, {"a": [1]})

    def held(self):
        return repr((self.losses, self.queue, self.seen, self.counts, dict(self.by_kind)))


def test_lists_dicts_sets_and_queues_are_put_back_in_place():
    model = Keeps()
    before, losses, inner = model.held(), model.losses, model.by_kind["a"]
    state = Snapshot(model, [])
    model.losses.append(torch.zeros(1))
    model.queue.extend([2, 3])
    model.seen.add(4)
    model.counts["train"] += 1
    model.by_kind["a"].append(2)
    model.by_kind["b"] = []
    state.restore()
    assert model.held() == before
    assert (model.losses is losses, model.by_kind["a"] is inner, model.queue.maxlen) == (True, True, 2)


def test_a_restart_takes_back_the_buffers_that_convert_made():
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.register_buffer("amax", torch.zeros(()))

        def forward(self, x):
            self.amax.copy_(torch.maximum(self.amax, x.detach().abs().max().float()))
            return self.inner(x)

    def convert(model):
        from torchao.float8 import convert_to_float8_training

        from pytest_fp8.backends.torchao import torchao_config

        convert_to_float8_training(model, config=torchao_config("tensorwise", emulated=True))
        model[1] = Scaled(model[1])

    engine = serve(build=lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()), loss=square, convert=convert).engine
    engine.step(engine.training_batch(0, 0))
    assert engine.model[1].amax > 0
    engine.restart(0)
    assert engine.model[1].amax == 0
