"""Losses, training steps and optimizers of a user's own, and what of them looks wrong and is right."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as schedulers

from benchmarks.healthy.models import Block
from benchmarks.healthy.sound import Net, apart, backward, entry, finish, mlp, model, module, of, trained, vectors

# -- losses -----------------------------------------------------------------------------------------------------------


@module(lambda: {"embed": nn.Embedding(64, 64), "body": mlp(), "head": nn.Linear(64, 64)})
def Scored(self, ids):
    """Log-probabilities of whole sequences, by a tiny language model."""
    x = self.embed(ids)
    logits = self.head(x + self.body(x + x.cumsum(1).tanh())).float().log_softmax(-1)
    return logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


class Preferring(nn.Module):
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
    """DPO: a policy less a frozen copy of it, which is zero at first."""
    chosen = torch.arange(8).repeat(16, 1) + torch.randint(56, (16, 1))
    return {"chosen": chosen, "rejected": torch.randint(64, (16, 8))}


@of("loss")
def loss_of_either_sign(model, x):
    """As a policy's gain or an energy: it is above zero at first, and below zero in the end."""
    return apart(model, x) - 0.7


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


# -- steps ------------------------------------------------------------------------------------------------------------


@of("step")
def accumulation_and_clipping(model, batch, optimizer, precision):
    """Four micro-batches, gradients clipped by their norm, a step that is skipped where it is not finite."""
    losses = [backward(lambda model, x: apart(model, x) / 4, model, part, precision) for part in batch.chunk(4)]
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return sum(losses)


@of("step", build=lambda: Net(0.1))
def evaluation_in_the_step(model, batch, optimizer, precision):
    """Each step ends with an evaluation of a part of the rows."""
    loss = trained(apart)(model, batch, optimizer, precision)
    model.eval()
    with torch.no_grad(), precision():
        model(batch[:16])
    model.train()
    return loss


@of("step")
def autocast_in_the_step(model, batch, optimizer, precision):
    """The user's own torch.autocast around the forward pass."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16), precision():
        loss = apart(model, batch)
    loss.backward()
    finish(optimizer)
    return loss.detach()


@of("step")
def conflicting_gradients(model, batch, optimizer, precision):
    """Two losses by torch.autograd.grad(); the second's part against the first is left out (PCGrad)."""
    with precision():
        made = model(batch).float()
        losses = [(made[:, :32] - batch[:, :32].sin()).square().mean(), (made - batch.cos()).square().mean()]
    weights = list(model.parameters())
    one, other = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses)
    against = sum((a * b).sum().float() for a, b in zip(one, other, strict=True)).clamp(max=0)
    against = against / sum(a.square().sum().float() for a in one)
    for weight, a, b in zip(weights, one, other, strict=True):
        weight.grad = a + b - (against * a).to(a.dtype)
    finish(optimizer)
    return sum(losses).detach()


@of("step", batch=lambda step: torch.randint(1 << 30, ()))
def loop_that_loads_its_own_data(model, batch, optimizer, precision):
    """The step draws its batches from a loader of its own; what batch(step) gives is not used."""
    generator = torch.Generator().manual_seed(int(batch))
    data = torch.randn(256, 64, generator=generator).to(torch.bfloat16)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True, generator=generator)
    losses = [backward(apart, model, part, precision) for part in list(loader)[:2]]
    finish(optimizer)
    return sum(losses) / 2


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
        return backward(lambda model, x: F.mse_loss(model(x).float(), wanted.float()), model, x, precision)

    return optimizer.step(closure)


@module(
    lambda: {
        "generator": nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)),
        "critic": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 16)),
    }
)
def Adversaries(self, noise=None, x=None):
    made = self.generator(noise) if x is None else x
    return self.critic(made).float().mean(1)


@of("step", build=Adversaries, optimizer=lambda weights: AdamW(weights, lr=5e-4, betas=(0.5, 0.9)))
def generator_and_critic(model, batch, optimizer, precision):
    """A GAN: two losses, two backward passes and two steps of one optimizer; only one half moves in each."""
    noise = torch.randn(len(batch), 32, dtype=batch.dtype, device=batch.device)
    with precision():
        made = model.generator(noise)
        critic = F.softplus(-model(x=batch.tanh())).mean() + F.softplus(model(x=made.detach())).mean()
    critic.backward()
    finish(optimizer)
    model.critic.requires_grad_(False)
    loss = backward(lambda model, noise: F.softplus(-model(noise)).mean(), model, noise, precision)
    model.critic.requires_grad_(True)
    finish(optimizer)
    return critic.detach() + loss


def first_frozen():
    model = Net()
    model.up.requires_grad_(False)
    model.seen = 0
    return model


def trained_weights(parameters):
    return AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


# No stored state fits a new optimizer that lacks a group, for torch as for these stores.
@of("step", build=first_frozen, optimizer=trained_weights, case={"questions": ("layers", "numerics", "loss")})
def gradual_unfreezing(model, batch, optimizer, precision):
    """The step adds a layer's parameters to the optimizer once it unfreezes them."""
    model.seen += 1
    if model.seen > 3 and len(optimizer.param_groups) == 1:
        model.up.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 5e-4})
    return trained(apart)(model, batch, optimizer, precision)


def counting(parameters):
    made = AdamW(parameters, lr=1e-3)
    made.steps = 0
    return made


@of("step", build=lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), mlp()), optimizer=counting)
def frozen_on_the_way(model, batch, optimizer, precision):
    """A norm and the first layer are frozen once, in the twelfth step."""
    optimizer.steps += 1
    if optimizer.steps == 12:
        model[1].eval()
        model[0].requires_grad_(False)
    return trained(apart)(model, batch, optimizer, precision)


@model(
    lambda: {
        "blocks": nn.ModuleList(Block() for _ in range(4)),
        "last": nn.Linear(64, 64),
        "dropped": random.Random(5),
        "noise": np.random.default_rng(5),
        "seen": None,
    }
)
def draws_of_its_own(self, x):
    """Blocks dropped, and noise, by generators that the model holds; and a number that it keeps from its first pass."""
    for block in self.blocks:
        if not self.training or self.dropped.random() > 0.1:
            x = block(x)
    self.seen = 1.0 if self.seen is None else 0.9 * self.seen + 0.1
    return self.last(x + self.seen * 0.01 * float(self.noise.standard_normal()))


KNOWN = {}


@of("step")
def step_looked_up_once(model, batch, optimizer, precision):
    """The loop keeps optimizer.step in a variable."""
    loss = backward(apart, model, batch, precision)
    KNOWN.setdefault(id(optimizer), (optimizer, optimizer.step))[1]()
    optimizer.zero_grad(set_to_none=True)
    return loss


# -- optimizers -------------------------------------------------------------------------------------------------------


class Warmup:
    """A schedule of ten lines, without state_dict() and get_last_lr()."""

    def __init__(self, optimizer):
        self.optimizer, self.now = optimizer, 0
        self.step()

    def step(self):
        self.now += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, self.now / 5)


def one_cycle(optimizer):
    return schedulers.OneCycleLR(optimizer, 5e-3, total_steps=60, div_factor=5)


for _name, _what, _schedule in (
    ("one_cycle", "OneCycleLR, which also moves the momentum.", one_cycle),
    ("plateau", "A schedule that goes by the loss.", lambda made: schedulers.ReduceLROnPlateau(made, patience=4)),
    ("schedule_of_ten_lines", "A learning-rate schedule of a class of the user's own.", Warmup),
):

    def _optimizer(parameters, schedule=_schedule):
        made = AdamW(parameters, lr=2e-3)
        made.scheduler = schedule(made)
        return made

    entry(_name, _what, optimizer=_optimizer)


@of("optimizer")
def groups_of_parameters(parameters):
    """Norms and biases without decay, the last layer with a rate of its own."""
    held = list(parameters)
    plain, matrices = [p for p in held if p.dim() < 2], [p for p in held if p.dim() >= 2]
    groups = [
        {"params": matrices[:-1], "weight_decay": 0.1},
        {"params": matrices[-1:], "lr": 3e-4, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


class ByWeight(torch.optim.Optimizer):
    """Each weight with a gradient is moved by itself."""

    rate = 1e-3

    def __init__(self, params):
        super().__init__(params, {"lr": self.rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group["lr"])


class Lion(ByWeight):
    rate = 3e-4

    def move(self, p, gradient, state, rate):
        held = state.setdefault("mean", torch.zeros_like(p))
        p.sub_((0.9 * held + 0.1 * gradient).sign(), alpha=rate)
        held.lerp_(gradient, 0.01)


class Master(ByWeight):
    """Adam on a copy of each weight in float32."""

    def move(self, p, gradient, state, rate):
        state.setdefault("master", p.detach().float().clone())
        mean = state.setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
        square = state.setdefault("square", torch.zeros_like(p, dtype=torch.float32))
        mean.lerp_(gradient.float(), 0.1)
        square.lerp_(gradient.float().square(), 0.05)
        state["master"].sub_(mean / (square.sqrt() + 1e-8), alpha=rate)
        p.copy_(state["master"])

    def load_state_dict(self, state_dict):
        """torch's own casts the state of a weight to the weight's dtype, and the next step would raise."""
        super().load_state_dict(state_dict)
        held = [p for group in self.param_groups for p in group["params"]]
        for index, entries in state_dict["state"].items():
            self.state[held[index]] = {name: value.clone() for name, value in entries.items()}


class MasterCopies(AdamW):
    """AdamW on float32 copies of the weights; its groups hold these copies alone, as in Apex and Megatron."""

    def __init__(self, parameters):
        self.live = list(parameters)
        super().__init__([p.detach().float().clone() for p in self.live], lr=2e-3)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for p in self.live:
            p.grad = None

    @torch.no_grad()
    def step(self, closure=None):
        pairs = list(zip(self.param_groups[0]["params"], self.live, strict=True))
        for master, p in pairs:
            master.grad = None if p.grad is None else p.grad.float()
        super().step()
        for master, p in pairs:
            p.copy_(master)


def save_copies(model, optimizer, folder):
    masters = optimizer.param_groups[0]["params"]
    torch.save([model.state_dict(), optimizer.state_dict(), masters], folder / "all.pt")


def load_copies(model, optimizer, folder):
    weights, state, masters = torch.load(folder / "all.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    for mine, stored in zip(optimizer.param_groups[0]["params"], masters, strict=True):
        mine.data.copy_(stored)


@module(lambda base: {"base": base, "down": nn.Linear(64, 16, bias=False), "up": nn.Linear(16, 64, bias=False)})
def Adapted(self, x):
    return self.base(x) + self.up(self.down(x))


def pretrained():
    torch.manual_seed(1)
    net = Net().requires_grad_(False)
    net.last = Adapted(net.last)
    return net


def adapters_of(model):
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def save_adapters(model, optimizer, folder):
    torch.save([{n: p.detach() for n, p in adapters_of(model).items()}, optimizer.state_dict()], folder / "adapters.pt")


def load_adapters(model, optimizer, folder):
    weights, state = torch.load(folder / "adapters.pt")
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    optimizer.load_state_dict(state)


entry(
    "adapters_saved_alone",
    "A base that build() loads, and adapters that are trained and saved without it.",
    build=pretrained,
    optimizer=trained_weights,
    save=save_adapters,
    load=load_adapters,
)


class Lookahead(torch.optim.Optimizer):
    """Every third step goes back half the way to the slow weights (Zhang et al. 2019)."""

    def __init__(self, parameters):
        self.optimizer, self.counter = AdamW(parameters, lr=1e-3), 0
        super().__init__(self.optimizer.param_groups, {})
        self.param_groups = self.optimizer.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % 3 == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for fast, kept in zip(group["params"], slow, strict=True):
                        kept.lerp_(fast, 0.5)
                        fast.copy_(kept)
        return loss


for _name, _what, _optimizer, _more in (
    ("lion", "A sign of a moving mean: the smallest gradient moves a weight as far as the largest.", Lion, {}),
    ("adafactor", "State that is smaller than the weight.", lambda p: torch.optim.Adafactor(p, lr=3e-2), {}),
    ("master_weights", "Weights in float32 in the optimizer's state, which its own load keeps in float32.", Master, {}),
    (
        "master_copies",
        "Master weights in float32 in the optimizer's groups, in place of the model's; saved and loaded by hand.",
        MasterCopies,
        {"save": save_copies, "load": load_copies},
    ),
    ("lookahead", "An optimizer that wraps another one and keeps slow weights.", Lookahead, {}),
):
    entry(_name, _what, optimizer=_optimizer, **_more)


class MuonAndAdamW(torch.optim.Optimizer):
    """The groups of both, one after the other."""

    def __init__(self, parameters):
        held = list(parameters)
        self.both = [
            torch.optim.Muon([p for p in held if p.dim() == 2], lr=1e-2),
            AdamW([p for p in held if p.dim() != 2], lr=1e-3),
        ]
        super().__init__([group for each in self.both for group in each.param_groups], {})

    def step(self, closure=None):
        for each in self.both:
            each.step()

    def state_dict(self):
        return {str(index): each.state_dict() for index, each in enumerate(self.both)}

    def load_state_dict(self, state_dict):
        for index, each in enumerate(self.both):
            each.load_state_dict(state_dict[str(index)])


entry("muon_and_adamw", "Two optimizers in one; the first multiplies matrices itself.", optimizer=MuonAndAdamW)


class SAM(torch.optim.Optimizer):
    """With its two halves, first_step() and second_step(), as most copies of it have them."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = AdamW(self.param_groups, lr=1e-3)
        self.param_groups, self.base_optimizer.state = self.base_optimizer.param_groups, self.state
        self.old = {}

    @torch.no_grad()
    def first_step(self):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = 0.02 / (nn.utils.get_total_norm([p.grad for p in held]) + 1e-6)
        for p in held:
            self.old[p] = p.detach().clone()
            p.add_(p.grad * size)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        while self.old:
            p, old = self.old.popitem()
            p.copy_(old)
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise RuntimeError("SAM has two steps")


@of("step", optimizer=SAM)
def sam_of_two_steps(model, batch, optimizer, precision):
    """SAM, whose step() is never called: the loop calls its two halves."""
    for half in (optimizer.first_step, optimizer.second_step):
        loss = backward(apart, model, batch, precision)
        half()
    return loss


# -- gradients and steps that look wrong and are right -----------------------------------------------------------------


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


# -- forward passes that look wrong and are right ----------------------------------------------------------------------


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
