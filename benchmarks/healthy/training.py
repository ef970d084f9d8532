"""Training steps and losses of a user's own: accumulation, several models, both signs, large values."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import Net, apart, classes_of, entry, finish, mlp, module, of, trained, vectors

# -- steps ------------------------------------------------------------------------------------------------------------


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
    loss = trained(apart)(model, batch, optimizer, precision)
    model.eval()
    with torch.no_grad(), precision():
        model(batch[:16])
    model.train()
    return loss


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
    loss = trained(lambda model, x: model(x + torch.randn_like(x), x))(model, batch, optimizer, precision)
    model.follow()
    return loss


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


def fixed(step):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 64, generator=generator)
    return x, x.sin() + torch.randn(512, 64, generator=generator)


def searching(parameters):
    return torch.optim.LBFGS(parameters, max_iter=2, history_size=4, line_search_fn="strong_wolfe")


@of("step", batch=fixed, optimizer=searching)
def closure_optimizer(model, batch, optimizer, precision):
    """LBFGS on one fixed, noisy batch: a line search runs forward and backward several times inside each step."""
    x, wanted = batch

    def closure():
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = F.mse_loss(model(x).float(), wanted.float())
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


@module(
    lambda: {
        "generator": nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)),
        "critic": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 16)),
    }
)
def Adversaries(self, noise=None, x=None):
    made = self.generator(noise) if x is None else x
    return self.critic(made).float().mean(1)


@of("step", build=Adversaries, optimizer=lambda weights: torch.optim.AdamW(weights, lr=5e-4, betas=(0.5, 0.9)))
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


@of("step", batch=lambda step: (vectors(64), (torch.rand(64) > 0.3).float()))
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


def harder(step):
    x = vectors(128) * (0.5 + 0.01 * min(step, 50))
    return {"x": x, "labels": classes_of(x, 16), "weight": min(1.0, step / 500)}


@of("loss", batch=harder, learning_rate=4e-3)
def curriculum_by_step(model, batch):
    """Harder data from step to step, and a weight of one loss term that grows."""
    made = model(batch["x"]).float()
    return F.cross_entropy(made, batch["labels"]) + batch["weight"] * F.mse_loss(made, batch["x"].float().sin())


# -- losses -----------------------------------------------------------------------------------------------------------


@module(lambda: {"embed": nn.Embedding(64, 64), "body": mlp(), "head": nn.Linear(64, 64)})
def Scored(self, ids):
    """Log-probabilities of whole sequences, by a tiny language model."""
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


@module(
    lambda: {
        "body": nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()),
        "actor": nn.Linear(128, 16),
        "critic": nn.Linear(128, 1),
    }
)
def ActorCritic(self, x):
    hidden = self.body(x)
    return self.actor(hidden).float().log_softmax(-1), self.critic(hidden).float().squeeze(-1)


def rewarded(step):
    x = vectors(128)
    action = torch.randint(16, (128,))
    reward = (classes_of(x, 16) == action).float() * 2 - 0.5
    return {"state": x, "action": action, "reward": reward}


@of("loss", build=ActorCritic, batch=rewarded)
def actor_and_critic(model, batch):
    """A clipped policy gradient, a value loss and an entropy bonus: the sum has either sign."""
    actions, value = model(batch["state"])
    reward = batch["reward"].float()
    chosen = actions.gather(-1, batch["action"][:, None]).squeeze(-1)
    ratio, gain = (chosen + math.log(16)).exp(), reward - value.detach()
    policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(actions.exp() * actions).sum(-1).mean()
    return policy + 0.5 * F.mse_loss(value, reward) - 0.01 * entropy


@module(lambda: {"left": mlp(64), "right": mlp(32), "scale": nn.Parameter(torch.tensor(math.log(10.0)))})
def Towers(self, left, right):
    one, two = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
    return (self.scale.exp() * one @ two.T).float()


def two_sides(step):
    hidden = vectors(32, 16)
    return hidden.repeat(1, 4) + 0.1 * vectors(32), hidden.repeat(1, 2).sin()


@of("loss", build=Towers, batch=two_sides)
def contrastive_towers(model, batch):
    """CLIP: two towers of two widths, a learnt temperature; the similarity is a product outside every layer."""
    scores = model(*batch)
    right = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right))


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


entry("distillation", "A frozen teacher that stays in eval mode beside a student.", build=Distilled, loss=None)


@module(
    lambda: {
        "body": mlp(),
        "kind": nn.Linear(64, 10),
        "size": nn.Linear(64, 1),
        "tags": nn.Linear(64, 32),
    }
)
def Tasks(self, x):
    hidden = x + self.body(x)
    return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(-1), "tags": self.tags(hidden)}


@of("loss", build=Tasks, learning_rate=3e-3)
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


@of("loss", build=mlp, learning_rate=4e-3)
def quantiles(model, x):
    """Quantile regression with an evidence term: a mean of absolute values."""
    wanted = x.float().cumsum(1)[:, :16, None] / 4
    apart = wanted - model(x).float().unflatten(1, (16, 4))
    level = torch.tensor([0.1, 0.4, 0.6, 0.9])
    return torch.maximum(level * apart, (level - 1) * apart).mean()


@of("loss", build=mlp)
def adversarial_examples(model, x):
    """Each loss goes back through the model once by itself, to inputs that its own gradient moves (FGSM)."""
    given = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad((model(given) - x.sin()).float().square().mean(), given)
    return (model((given + 0.05 * gradient.sign()).detach()) - x.sin()).float().square().mean()
