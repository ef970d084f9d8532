"""Optimizers and schedules of a user's own."""

from __future__ import annotations

import math

import torch
from torch.optim import lr_scheduler as schedulers

from benchmarks.healthy.sound import entry, of


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
