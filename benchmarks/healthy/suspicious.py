"""Workloads that look as if something were wrong, and are right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as schedulers

from benchmarks.healthy.models import Block
from benchmarks.healthy.sound import Net, apart, backward, finish, mlp, model, of, trained, vectors

# -- gradients and steps ----------------------------------------------------------------------------------------------


@of("build", learning_rate=4e-3)
def output_that_begins_at_zero():
    """adaLN-zero: the last weight is zero, so that no layer below it has a gradient in the first step."""
    net = Net()
    nn.init.zeros_(net.last.weight)
    return net


@of("optimizer")
def rate_that_begins_at_zero(parameters):
    """A warm-up from zero: the first step moves no weight."""
    made = AdamW(parameters, lr=2e-3)
    made.scheduler = schedulers.LambdaLR(made, lambda step: min(1.0, step / 4))
    return made


@of("step")
def scaled_loss(model, batch, optimizer, precision):
    """As under a GradScaler: the loss is 1024 times as large, gradients are divided before the optimizer sees them."""
    loss = backward(lambda model, x: 1024 * apart(model, x), model, batch, precision)
    for p in model.parameters():
        p.grad.div_(1024)
    finish(optimizer)
    return loss / 1024


@of("loss")
def loss_of_a_millionth(model, x):
    """A loss and gradients that are a million times smaller than most."""
    return 1e-6 * apart(model, x)


class MainGradients(AdamW):
    """Megatron's main_grad: a hook adds each gradient to one in float32 and drops it; step() takes what was added."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-3)
        for p in self.param_groups[0]["params"]:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            p.register_post_accumulate_grad_hook(self.add)

    @staticmethod
    def add(p):
        p.main_grad += p.grad.float()
        p.grad = None

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = p.main_grad.to(p.dtype)
            p.main_grad.zero_()
        return super().step(closure)


@of("step", optimizer=MainGradients)
def gradients_in_float32(model, batch, optimizer, precision):
    """After the backward pass no weight has a gradient: hooks added them up elsewhere."""
    losses = [backward(lambda model, x: apart(model, x) / 2, model, part, precision) for part in batch.chunk(2)]
    finish(optimizer)
    return sum(losses)


class InBackward(torch.optim.Optimizer):
    """torchtune's way: each weight is moved by a hook as soon as it has its gradient; step() has nothing to do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
        for p in self.param_groups[0]["params"]:
            p.register_post_accumulate_grad_hook(self.move)

    @torch.no_grad()
    def move(self, p):
        p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        p.grad = None

    def step(self, closure=None):
        pass


@of("optimizer")
def weights_moved_in_the_backward_pass(parameters):
    """The optimizer's step finds no gradient, since hooks have moved the weights."""
    return InBackward(parameters)


def first_without_labels(step):
    return vectors(128), torch.ones(128) if step else torch.zeros(128)


@of("loss", batch=first_without_labels, case={"questions": ("layers", "numerics", "checkpoints")})
def batch_without_labels(model, batch):
    """The first batch has no label: its loss and its gradients are zero."""
    x, valid = batch
    each = (model(x) - x.sin()).float().square().mean(1)
    return (each * valid).sum() / valid.sum().clamp(min=1)


# -- forward passes ---------------------------------------------------------------------------------------------------


@model(lambda: {"enter": nn.Linear(64, 64), "again": nn.Linear(64, 64), "leave": nn.Linear(64, 64)})
def until_it_rests(self, x):
    """A layer is called until its output moves by less than a bound: how often, the numbers decide."""
    state = torch.zeros_like(x)
    for _ in range(12):
        before, state = state, torch.tanh(self.enter(x) + 0.5 * self.again(state))
        if (state - before).float().norm() < 0.1 * state.float().norm():
            break
    return self.leave(state)


@of("step")
def activations_kept_on_the_host(model, batch, optimizer, precision):
    """What the backward pass needs is packed and unpacked by hooks (torch.autograd.graph.save_on_cpu)."""
    with torch.autograd.graph.save_on_cpu():
        return trained(apart)(model, batch, optimizer, precision)


# torchao's rowwise recipes refuse torch.inference_mode().
@of("loss", recipes=("tensorwise",))
def labels_of_its_own(model, x):
    """Self-training: targets are what the model gives in eval mode, under torch.inference_mode()."""
    model.eval()
    with torch.inference_mode():
        wanted = model(x).sign()
    model.train()
    return apart(model, x) + 0.1 * F.mse_loss(model(x + 0.1 * torch.randn_like(x)).float(), wanted.clone().float())


@of("build")
def compiled_by_build():
    """build() compiles a block itself."""
    net = nn.Sequential(Block(), Block(), nn.Linear(64, 64))
    net[0].compile(backend="aot_eager")
    return net


@of("loss", build=lambda: nn.ModuleList([mlp(), mlp()]))
def parts_of_a_weight(model, x):
    """Nested sizes (Matryoshka): the second layer is also multiplied by the first half of its weight."""
    hidden = model[0](x)
    last = model[1][0]
    half = F.linear(hidden[:, :32], last.weight[:, :32], last.bias)
    return apart(lambda x: model[1](hidden), x) + 0.1 * (half - last(hidden)).float().square().mean()
