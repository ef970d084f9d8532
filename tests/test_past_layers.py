"""Code that multiplies with the weight of a converted layer in high precision and does not call the layer there."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from helpers.evidence import verdict_of
from helpers.loops import judge, judge_both, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.codes import L

pytestmark = pytest.mark.slow


def squares(model, x):
    return (model(x) - x).float().square().mean()


def by_function(x, layer):
    return functional.linear(x, layer.weight, layer.bias)


def by_transpose(x, layer):
    return x @ layer.weight.T.contiguous() + layer.bias


def by_halves(x, layer):
    return torch.cat([x @ half.t() for half in layer.weight.chunk(2)], -1)


def by_batches(x, layer):
    weight = layer.weight.t().to(torch.bfloat16).expand(2, -1, -1)
    return torch.bmm(x.to(torch.bfloat16).view(2, -1, x.shape[-1]), weight).flatten(0, 1)


def by_a_clone(x, layer):
    return functional.linear(x, layer.weight.clone(), layer.bias)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x = x.to(torch.bfloat16)
        ctx.save_for_backward(x, weight)
        return x @ weight.t().to(torch.bfloat16)

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight.to(given.dtype), given.t() @ x.to(given.dtype)


def by_own_function(x, layer):
    return ByHand.apply(x, layer.weight)


def model_of(past, where="forward", checkpointed=None):
    """Three Linears; ``past(x, layer)`` takes the place of the second's call. ``checkpointed``: whether reentrantly."""

    class Past(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(32, 64)

        def forward(self, x):
            again = torch._C._current_graph_task_id() != -1
            now = {"forward": self.training, "recompute": again, "evaluation": not self.training}[where]
            return past(x, self.inner) if now else self.inner(x)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.past, self.down = torch.nn.Linear(32, 32), Past(), torch.nn.Linear(64, 32)

        def block(self, x):
            return self.down(functional.gelu(self.past(x)))

        def forward(self, x):
            x = self.enter(x)
            if checkpointed is None or not self.training:
                return self.block(x)
            return checkpoint(self.block, x, use_reentrant=checkpointed)

    return Net


FORWARD, RECOMPUTE = L.FPROP_NOT_IN_FP8, L.RECOMPUTE_NOT_IN_FP8


@pytest.mark.parametrize(
    ("past", "how", "code"),
    [
        *((past, {}, FORWARD) for past in (by_function, by_transpose, by_halves, by_batches)),
        (by_batches, {"where": "recompute", "checkpointed": True}, RECOMPUTE),
        # torch itself refuses a non-reentrant recomputation that saves other tensors than the first forward pass.
        (by_a_clone, {"where": "recompute", "checkpointed": False}, RECOMPUTE),
        (by_own_function, {}, L.DGRAD_NOT_IN_FP8),
    ],
)
def test_a_product_past_its_layer_is_found(past, how, code):
    decision = judge(serve(build=model_of(past, **how), step=loop()))
    verdict_of(decision, Verdict.FAIL, code, "of 1 of 3 layers", "past.inner, bfloat16 by past")


def test_a_loss_that_multiplies_with_the_head_itself_is_found():
    def step(model, x, optimizer, precision):
        with precision():
            hidden = functional.gelu(model.past(model.enter(x)))
            loss = (functional.linear(hidden, model.down.weight) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    decision = judge(serve(build=model_of(None, "evaluation"), step=step))
    verdict_of(decision, Verdict.FAIL, L.FPROP_NOT_IN_FP8, "down, bfloat16 by code outside all modules")


def test_a_model_that_multiplies_with_all_weights_itself_is_told_so():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.only = torch.nn.Linear(32, 32)

        def forward(self, x):
            return functional.linear(x, self.only.weight.detach())

    def loss(model, x):
        return squares(model, x.requires_grad_())

    verdict_of(judge(serve(build=Net, loss=loss)), Verdict.FAIL, L.NEVER_CALLED)


# -- sound ------------------------------------------------------------------------------------------------------------


def held_to_error(x, layer):
    """FP8's error is a part of the loss, through the output."""
    output = layer(x)
    return output + 0.1 * (functional.linear(x, layer.weight, layer.bias) - output)


def tied(x, layer):
    """A decoder with the encoder's weight transposed."""
    return layer(functional.linear(layer(x), layer.weight.t()))


@pytest.mark.parametrize("past", [held_to_error, tied], ids=lambda past: past.__name__)
def test_a_product_beside_the_layers_own_is_not_in_its_place(past):
    verdict_of(judge_both(build=model_of(past), loss=squares), Verdict.PASS, "3 of 3 Linears in FP8")


class Resting(torch.nn.Module):
    """A converted layer that is not called in this step, whose weight a penalty regularises all the same."""

    def __init__(self):
        super().__init__()
        self.enter, self.rest = torch.nn.Linear(32, 32), torch.nn.Linear(32, 64)
        self.register_buffer("u", torch.randn(1, 64))

    def forward(self, x):
        return self.enter(x)


def orthogonal(model):
    weight = model.rest.weight
    return (weight.t() @ weight - torch.eye(32)).square().mean()


def spectral(model):
    with torch.no_grad():
        v = functional.normalize(model.u @ model.rest.weight).t()
    return (model.u @ model.rest.weight @ v).square().mean()


def with_merged_adapter(model):
    merged = model.rest.weight.clone()
    merged += torch.ones(64, 4) @ torch.ones(4, 32)
    return functional.linear(torch.randn(16, 32, dtype=merged.dtype), merged).square().mean()


@pytest.mark.parametrize("penalty", [orthogonal, spectral, with_merged_adapter])
def test_a_penalty_on_the_weight_of_a_layer_that_rests_is_no_product_of_the_layer(penalty):
    def loss(model, x):
        return squares(model, x) + penalty(model).float()

    verdict_of(judge(serve(build=Resting, loss=loss)), Verdict.PASS, "2 of 2 Linears in FP8")


def test_torchs_attention_may_multiply_with_the_weight_of_a_part_of_its_own():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.attention = torch.nn.Linear(32, 32), torch.nn.MultiheadAttention(32, 2)

        def forward(self, x):
            x = self.enter(x)
            return self.attention(x, x, x, need_weights=False)[0]

    verdict_of(judge_both(build=Net, loss=squares), Verdict.PASS, "attention.out_proj")
