"""Optimizers and schedules of a user's own, and steps that treat them otherwise than most."""

from __future__ import annotations

import math

import torch
from torch.optim import lr_scheduler as schedulers

from benchmarks.healthy.sound import Net, apart, entry, finish, of, trained, vectors


def with_schedule(make):
    """AdamW with a schedule on it."""

    def optimizer(parameters):
        made = torch.optim.AdamW(parameters, lr=2e-3)
        made.scheduler = make(made)
        return made

    return optimizer


def factor(step):
    return (step + 1) / 4 if step < 4 else 0.5 * (1 + math.cos(math.pi * min(1, (step - 4) / 40)))


for _name, _what, _make in (
    ("warm_up_and_cosine", "A linear warm-up, then a cosine.", lambda made: schedulers.LambdaLR(made, factor)),
    (
        "one_cycle",
        "OneCycleLR, which also moves the momentum.",
        lambda made: schedulers.OneCycleLR(made, 5e-3, total_steps=60, div_factor=5),
    ),
    ("plateau", "A schedule that goes by the loss.", lambda made: schedulers.ReduceLROnPlateau(made, patience=4)),
):
    entry(_name, _what, optimizer=with_schedule(_make))


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
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))


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


entry("lion", "A sign of a moving mean: the smallest gradient moves a weight as far as the largest.", optimizer=Lion)


class Muon(ByWeight):
    """Momentum made orthogonal by products; what is no matrix gets plain momentum."""

    rate = 5e-3

    def move(self, p, gradient, state, rate):
        held = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(gradient)
        p.sub_(orthogonal(held) if p.dim() == 2 else held, alpha=rate)


def orthogonal(matrix):
    """Newton and Schulz's steps, in bfloat16, as Muon takes them."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 3:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


entry("muon", "An optimizer that multiplies matrices itself.", optimizer=Muon)


class Factored(ByWeight):
    """Adafactor's way: second moments by row and column, in float32."""

    def move(self, p, gradient, state, rate):
        square = gradient.float().square() + 1e-12
        state["step"] = state.get("step", 0) + 1
        keep = 1 - state["step"] ** -0.8
        for name, dim in (("row", -1), ("column", 0)) if p.dim() == 2 else (("all", ()),):
            mean = square.mean(dim) if dim != () else square
            state[name] = keep * state[name] + (1 - keep) * mean if name in state else mean
        scale = torch.outer(state["row"], state["column"]) / state["row"].mean() if p.dim() == 2 else state["all"]
        p.sub_((gradient.float() * scale.rsqrt()).to(p.dtype), alpha=rate)


entry("factored_moments", "Adafactor's way: state that is smaller than the weight.", optimizer=Factored)


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


entry(
    "master_weights",
    "Weights in float32 beside the model's, in the optimizer's state, which its own load keeps in float32.",
    optimizer=Master,
)


class MasterCopies(torch.optim.AdamW):
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


entry(
    "master_copies",
    "Master weights in float32 in the optimizer's groups, in place of the model's; saved and loaded by hand.",
    optimizer=MasterCopies,
    save=save_copies,
    load=load_copies,
)


# -- steps and wrappers -----------------------------------------------------------------------------------------------


def first_frozen():
    model = Net()
    model.up.requires_grad_(False)
    model.seen = 0
    return model


def trained_weights(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


# No stored state fits a new optimizer that lacks a group, for torch as for these stores.
@of("step", build=first_frozen, optimizer=trained_weights, case={"questions": ("layers", "numerics", "loss")})
def gradual_unfreezing(model, batch, optimizer, precision):
    """The step adds a layer's parameters to the optimizer once it unfreezes them."""
    model.seen += 1
    if model.seen > 3 and len(optimizer.param_groups) == 1:
        model.up.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.up.parameters()), "lr": 5e-4})
    return trained(apart)(model, batch, optimizer, precision)


KNOWN = {}


@of("step")
def step_looked_up_once(model, batch, optimizer, precision):
    """The loop keeps optimizer.step in a variable."""
    with precision():
        loss = apart(model, batch)
    loss.backward()
    KNOWN.setdefault(id(optimizer), (optimizer, optimizer.step))[1]()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


class Lookahead(torch.optim.Optimizer):
    """Every third step goes back half the way to the slow weights (Zhang et al. 2019)."""

    def __init__(self, optimizer):
        self.optimizer, self.counter = optimizer, 0
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
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


entry(
    "lookahead",
    "An optimizer that wraps another one and keeps slow weights.",
    optimizer=lambda p: Lookahead(torch.optim.AdamW(p, lr=1e-3)),
)


class SAM(torch.optim.Optimizer):
    """With its two halves, first_step() and second_step(), as most copies of it have them."""

    def __init__(self, parameters, rho=0.02):
        super().__init__(parameters, {"rho": rho})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=1e-3)
        self._old = {}
        self.param_groups, self.base_optimizer.state = self.base_optimizer.param_groups, self.state

    def _gradients(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self):
        size = self.param_groups[0]["rho"] / (torch.nn.utils.get_total_norm([p.grad for p in self._gradients()]) + 1e-6)
        for p in self._gradients():
            self._old[p] = p.detach().clone()
            p.add_(p.grad * size)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._gradients():
            p.copy_(self._old.pop(p))
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise RuntimeError("SAM has two steps")


@of("step", optimizer=SAM)
def sam_of_two_steps(model, batch, optimizer, precision):
    """SAM, whose step() is never called: the loop calls its two halves."""
    for half in (optimizer.first_step, optimizer.second_step):
        with precision():
            loss = apart(model, batch)
        loss.backward()
        half()
    return loss.detach()


@of("step", batch=lambda step: vectors(192), optimizer=lambda weights: torch.optim.AdamW(weights, lr=2e-3))
def reptile(model, batch, optimizer, precision):
    """Three inner steps, then the weights go a part of the way (Reptile)."""
    before = [p.detach().clone() for p in model.parameters()]
    total = 0.0
    for part in batch.chunk(3):
        with precision():
            loss = apart(model, part)
        loss.backward()
        finish(optimizer)
        total = total + loss.detach() / 3
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old.lerp(p, 0.5))
    return total


class Warmup:
    """A schedule of ten lines, without state_dict() and get_last_lr()."""

    def __init__(self, optimizer, steps):
        self.optimizer, self.steps, self.now = optimizer, steps, 0
        self.step()

    def step(self):
        self.now += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, self.now / self.steps)


entry(
    "schedule_of_ten_lines",
    "A learning-rate schedule of a class of the user's own.",
    optimizer=with_schedule(lambda made: Warmup(made, 5)),
)
