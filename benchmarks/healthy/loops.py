"""Training steps of a user's own."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import Net, apart, classes_of, finish, of, sound, vectors
from pytest_fp8 import Workload


@of("step")
def accumulation_and_clipping(model, batch, optimizer, precision):
    """Four micro-batches, gradients clipped by their norm."""
    total = 0.0
    for part in batch.chunk(4):
        with precision():
            loss = apart(model, part) / 4
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finish(optimizer)
    return total


@of("step", build=lambda: Net(0.1))
def evaluation_in_the_step(model, batch, optimizer, precision):
    """Each step ends with an evaluation of an odd number of rows."""
    with precision():
        loss = apart(model, batch)
    loss.backward()
    finish(optimizer)
    model.eval()
    with torch.no_grad(), precision():
        model(batch[:16])
    model.train()
    return loss.detach()


class Averaged(nn.Module):
    """A student and the moving average of its weights, which gives the targets (BYOL, DINO)."""

    def __init__(self):
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x, y):
        with torch.no_grad():
            wanted = self.teacher(y)
        return 2 - 2 * F.cosine_similarity(self.student(x).float(), wanted.float(), dim=-1).mean()

    @torch.no_grad()
    def follow(self, rate=0.9):
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 1 - rate)


# Four copies of each number: there is something to learn about the noise.
@of("step", build=Averaged, batch=lambda step: vectors(128, 16).repeat(1, 4), learning_rate=4e-3)
def moving_average_teacher(model, batch, optimizer, precision):
    """A moving average of the weights, taken in the step, gives the targets: a clean view's for a noisy one."""
    with precision():
        loss = model(batch + torch.randn_like(batch), batch)
    loss.backward()
    finish(optimizer)
    model.follow()
    return loss.detach()


@of("step", batch=lambda step: torch.randint(1 << 30, ()))
def loop_that_loads_its_own_data(model, batch, optimizer, precision):
    """The step draws its batches from a loader of its own; what batch(step) gives is not used."""
    generator = torch.Generator().manual_seed(int(batch))
    data = torch.randn(256, 64, generator=generator).to(torch.bfloat16)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, generator=generator)
    total = 0.0
    for part in list(loader)[:2]:
        with precision():
            loss = apart(model, part)
        loss.backward()
        total = total + loss.detach() / 2
    finish(optimizer)
    return total


@sound()
def closure_optimizer():
    """LBFGS on one fixed, noisy batch: a line search runs forward and backward several times inside each step."""

    def fixed(step):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(512, 64, generator=generator)
        return x, x.sin() + torch.randn(512, 64, generator=generator)

    def step(model, batch, optimizer, precision):
        x, wanted = batch

        def closure():
            optimizer.zero_grad(set_to_none=True)
            with precision():
                loss = F.mse_loss(model(x).float(), wanted.float())
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    def searching(parameters):
        return torch.optim.LBFGS(parameters, max_iter=2, history_size=4, line_search_fn="strong_wolfe")

    return Workload(build=Net, batch=fixed, step=step, optimizer=searching)


class Adversaries(nn.Module):
    """A generator and a critic in one module."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 16))

    def forward(self, noise=None, x=None):
        made = self.generator(noise) if x is None else x
        return self.critic(made).float().mean(1)


def generator_and_critic_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=5e-4, betas=(0.5, 0.9))


@of("step", build=Adversaries, optimizer=generator_and_critic_optimizer)
def generator_and_critic(model, batch, optimizer, precision):
    """A GAN: two losses, two backward passes and two steps of one optimizer; only one half moves in each."""
    noise = torch.randn(len(batch), 32, dtype=batch.dtype, device=batch.device)
    with precision():
        made = model.generator(noise)
        critic = F.softplus(-model(x=batch.tanh())).mean() + F.softplus(model(x=made.detach())).mean()
    critic.backward()
    finish(optimizer)
    model.critic.requires_grad_(False)
    with precision():
        loss = F.softplus(-model(noise)).mean()
    loss.backward()
    model.critic.requires_grad_(True)
    finish(optimizer)
    return critic.detach() + loss.detach()


def skipped_where_not_finite_batch(step):
    return vectors(64), (torch.rand(64) > 0.3).float()


@of("step", batch=skipped_where_not_finite_batch)
def skipped_where_not_finite(model, batch, optimizer, precision):
    """A step that looks at its gradients' norm and would skip a bad one; mean over valid rows only."""
    x, valid = batch
    with precision():
        each = (model(x) - x.sin()).float().square().mean(1)
    loss = (each * valid).sum() / valid.sum().clamp(min=1)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def curriculum_by_step_batch(step):
    x = vectors(128) * (0.5 + 0.01 * min(step, 50))
    return {"x": x, "labels": classes_of(x, 16), "weight": min(1.0, step / 500)}


@of("loss", batch=curriculum_by_step_batch, learning_rate=4e-3)
def curriculum_by_step(model, batch):
    """Harder data from step to step, and a weight of one loss term that grows."""
    made = model(batch["x"]).float()
    return F.cross_entropy(made, batch["labels"]) + batch["weight"] * F.mse_loss(made, batch["x"].float().sin())
