"""What a Linear's own class does besides its product is told from operators, not from its having a forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_fp8.worker.run.dropped_behaviour import with_behaviour

pytestmark = pytest.mark.slow


class Casts(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Scales(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Reverses(nn.Linear):
    def forward(self, x):
        class Turned(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.view_as(value)

            @staticmethod
            def backward(ctx, gradient):
                return -gradient

        return Turned.apply(super().forward(x))


class Drops(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Counts(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class InFloat32(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.float()).to(x.dtype)


class TakesMore(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x * scale)


@pytest.mark.parametrize("kind", [Scales, Reverses, Drops, Counts, InFloat32, TakesMore])
def test_a_forward_that_does_more_is_named(kind):
    layer = kind(16, 16).to(torch.bfloat16)
    before = dict(vars(layer))
    assert list(with_behaviour(nn.Sequential(layer))) == ["0"]
    assert vars(layer) == before


def test_a_forward_that_casts_alone_is_a_product():
    assert not with_behaviour(nn.Sequential(Casts(16, 16).to(torch.bfloat16)))
    frozen = Casts(16, 16).to(torch.bfloat16).requires_grad_(False)
    assert not with_behaviour(nn.Sequential(frozen))
