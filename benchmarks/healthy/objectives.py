"""Losses of many kinds: differences, both signs, several at once, large ones, with a second model."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import built, classes_of, entry, mlp, of, vectors


class Scored(nn.Module):
    """Per-token log-probabilities of a tiny language model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.body = mlp()
        self.head = nn.Linear(64, 64)

    def forward(self, ids):
        x = self.embed(ids)
        logits = self.head(x + self.body(x + x.cumsum(1).tanh())).float().log_softmax(-1)
        return logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


class Preferring(nn.Module):
    """A policy and a frozen copy of it in one module."""

    def __init__(self):
        super().__init__()
        self.policy = Scored()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen, rejected):
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            before = self.reference(both)
        better, worse = (self.policy(both) - before).chunk(2)
        return -F.logsigmoid(0.5 * (better - worse)).mean()


@of("batch", build=Preferring, loss=None)
def preferences_between_two_models(step):
    """DPO: a policy and a frozen reference model in one module; the model gives its loss."""
    chosen = torch.arange(8).repeat(16, 1) + torch.randint(56, (16, 1))
    return {"chosen": chosen, "rejected": torch.randint(64, (16, 8))}


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.actor, self.critic = nn.Linear(128, 16), nn.Linear(128, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.actor(hidden).float().log_softmax(-1), self.critic(hidden).float().squeeze(-1)


def actor_and_critic_batch(step):
    x = vectors(128)
    action = torch.randint(16, (128,))
    reward = (classes_of(x, 16) == action).float() * 2 - 0.5
    return {"state": x, "action": action, "reward": reward}


@of("loss", build=ActorCritic, batch=actor_and_critic_batch)
def actor_and_critic(model, batch):
    """A clipped policy gradient, a value loss and an entropy bonus: the sum has either sign."""
    actions, value = model(batch["state"])
    reward = batch["reward"].float()
    chosen = actions.gather(-1, batch["action"][:, None]).squeeze(-1)
    ratio, gain = (chosen + math.log(16)).exp(), reward - value.detach()
    policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(actions.exp() * actions).sum(-1).mean()
    return policy + 0.5 * F.mse_loss(value, reward) - 0.01 * entropy


class Towers(nn.Module):
    """CLIP: two towers and a learnt scale."""

    def __init__(self):
        super().__init__()
        self.left, self.right = mlp(64), mlp(32)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, left, right):
        one, two = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        return (self.scale.exp() * one @ two.T).float()


def contrastive_towers_batch(step):
    hidden = vectors(32, 16)
    return hidden.repeat(1, 4) + 0.1 * vectors(32), hidden.repeat(1, 2).sin()


@of("loss", build=Towers, batch=contrastive_towers_batch)
def contrastive_towers(model, batch):
    """Two towers of two widths, a learnt temperature; the similarity is a product outside every layer."""
    scores = model(*batch)
    right = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right))


@built(
    "distillation",
    "A frozen teacher that stays in eval mode beside a student that trains.",
    batch=lambda step: vectors(128),
    loss=None,
)
class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(mlp(hidden=256), nn.Linear(64, 16)).requires_grad_(False).eval()
        self.student = nn.Sequential(mlp(), nn.Linear(64, 16))

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            wanted = (4 * self.teacher(x)).float().softmax(-1)
        return F.kl_div(self.student(x).float().log_softmax(-1), wanted, reduction="batchmean")


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.kind, self.size = nn.Linear(64, 10), nn.Linear(64, 1)
        self.tags = nn.Linear(64, 32)

    def forward(self, x):
        hidden = x + self.body(x)
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(-1), "tags": self.tags(hidden)}


@of("loss", build=Tasks, batch=lambda step: vectors(128), learning_rate=3e-3)
def several_tasks(model, x):
    """Three heads: cross entropy, Huber and multi-label losses, weighted and added."""
    made = {name: value.float() for name, value in model(x).items()}
    kind = F.cross_entropy(made["kind"], classes_of(x, 10))
    size = F.huber_loss(made["size"], x.float().square().mean(1))
    return kind + 0.5 * size + F.binary_cross_entropy_with_logits(made["tags"], (x[:, :32] > 0).float())


@of("loss", build=mlp, batch=lambda step: vectors(96), learning_rate=4e-3)
def loss_summed_over_the_batch(model, x):
    """A sum over the batch: about 2000."""
    return (model(x).float() - 4 * x.float().sin()).square().sum() / 20


@of("loss", build=mlp, batch=lambda step: vectors(96), learning_rate=1e-2)
def loss_in_bfloat16(model, x):
    """A loss of about 60 that is never turned into float32: it comes in steps of a quarter."""
    return (model(x) - 11 * x.sin()).square().mean()


@of("loss", build=mlp, batch=lambda step: vectors(128), learning_rate=4e-3)
def quantiles(model, x):
    """Quantile regression with an evidence term: a mean of absolute values."""
    wanted = x.float().cumsum(1)[:, :16, None] / 4
    apart = wanted - model(x).float().unflatten(1, (16, 4))
    level = torch.tensor([0.1, 0.4, 0.6, 0.9])
    return torch.maximum(level * apart, (level - 1) * apart).mean()


def adversarial(model, x):
    """The loss at inputs that its own gradient has moved (FGSM)."""
    given = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad((model(given) - x.sin()).float().square().mean(), given)
    return (model((given + 0.05 * gradient.sign()).detach()) - x.sin()).float().square().mean()


entry(
    "adversarial_examples",
    "Each loss goes back through the model once by itself.",
    build=mlp,
    batch=lambda step: vectors(128),
    loss=adversarial,
)
