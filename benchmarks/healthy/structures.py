"""Layers that are not simply trained Linears (frozen, normed, computed, low-rank, of odd sizes), mixtures of experts,
tables of embeddings, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from benchmarks.healthy.sound import classes_of, entry, mlp, model, module, of, vectors
from pytest_fp8 import pad_to_multiple

# -- parameters -------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """A backbone and what is put on top of it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(mlp(), nn.LayerNorm(64), mlp())
        self.top = mlp()

    def forward(self, x):
        return self.top(self.backbone(x))


@of("build")
def partly_frozen():
    """Every second layer and all biases are frozen; gradients pass through."""
    model = Backbone()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name and not name.startswith("backbone.2.0"))
    return model


@of("build")
def frozen_below_the_first_trained():
    """Frozen layers at the input, which need no gradient of their own: part of the products does not run."""
    model = Backbone()
    model.backbone[0].requires_grad_(False)
    return model


@model(lambda: {"backbone": Backbone().backbone.requires_grad_(False), "top": mlp()})
def frozen_backbone(self, x):
    """A frozen backbone, run without gradients, under a trained head."""
    with torch.no_grad():
        seen = self.backbone(x)
    return self.top(x + seen)


@model(
    lambda: {
        "convolve": weight_norm(nn.Conv1d(4, 16, 3, padding=1)),
        "normed": weight_norm(nn.Linear(256, 64)),
        "body": mlp(),
    },
    leave=("normed",),
)
def weight_normed(self, x):
    """weight_norm on a convolution and on a Linear, which `leave` names."""
    x = self.normed(self.convolve(x.unflatten(1, (4, 16))).relu().flatten(1))
    return x + self.body(x)


def critic():
    return nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(0.2), mlp(), nn.Linear(64, 16))


@of("loss", build=critic, leave=("0",))
def spectrally_normed_critic(model, x):
    """spectral_norm moves its vectors in every forward pass; the layers are left in high precision."""
    real, made = model(x).float().mean(1), model(x.flip(1).sin() * 2).float().mean(1)
    return F.relu(1 - real).mean() + F.relu(1 + made).mean()


@module(
    lambda inside, outside: {
        "base": nn.Linear(inside, outside).requires_grad_(False),
        "a": nn.Parameter(0.1 * torch.randn(inside, 16)),
        "b": nn.Parameter(torch.zeros(16, outside)),
    }
)
def LowRank(self, x):
    return self.base(x) + (x @ self.a) @ self.b


entry(
    "adapters_by_hand",
    "A frozen base and low-rank raw parameters beside it.",
    build=lambda: nn.Sequential(LowRank(64, 128), nn.GELU(), LowRank(128, 64)),
    learning_rate=3e-3,
)


@model(
    lambda: {"fc1": nn.Linear(64, 128), "fc2": nn.Linear(128, 64), "out": nn.Linear(64, 64)},
    learning_rate=1e-2,
    case={"lora": 8, "lora_targets": ("fc1", "fc2")},
)
def adapters_of_peft(self, x):
    """LoRA adapters of peft on a model of the user's own (lora=8 in the mark)."""
    return self.out(x + self.fc2(F.silu(self.fc1(x))))


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient on."""

    @staticmethod
    def forward(ctx, x):
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SquaredProduct(torch.autograd.Function):
    """A product with its own backward pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


@model(lambda: {"body": mlp(), "last": nn.Linear(64, 64), "weight": nn.Parameter(0.1 * torch.randn(64, 64))})
def own_autograd_functions(self, x):
    """A straight-through estimator, and a product whose backward pass is written by hand."""
    return self.last(SquaredProduct.apply(Rounded.apply(self.body(x)), self.weight))


def with_commitment(model, x):
    made, commitment = model(x)
    return (made - x.sin()).float().square().mean() + 0.25 * commitment


@model(lambda: {"encode": mlp(), "decode": mlp(), "codes": torch.randn(32, 64)}, loss=with_commitment)
def moving_codebook(self, x):
    """Buffers that move in the forward pass (a vector-quantised bottleneck), chosen by an argmin."""
    seen = self.encode(x)
    chosen = torch.cdist(seen.detach().float(), self.codes.float()).argmin(1)
    code = self.codes[chosen]
    if self.training and torch.is_grad_enabled():
        with torch.no_grad():
            self.codes.index_add_(0, chosen, 0.01 * (seen.detach() - code))
    return self.decode(seen + (code - seen).detach()), F.mse_loss(seen.float(), code.float().detach())


def odd():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100), nn.ReLU(), nn.Linear(100, 10))


@of("loss", build=odd, learning_rate=3e-3)
def odd_sizes(model, x):
    """Layers of 100 and 10 features, which FP8 cannot take, beside one that it can."""
    return F.cross_entropy(model(x).float(), classes_of(x, 10))


# -- experts ----------------------------------------------------------------------------------------------------------

WIDTH, EXPERTS = 64, 4


class TopTwo(nn.Module):
    def __init__(self, count=EXPERTS):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x):
        weights, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = (chosen == index).nonzero(as_tuple=True)
            given = pad_to_multiple(x[row])
            out = out.index_add(0, row, weights[row, place, None].to(x.dtype) * expert(given)[: len(row)])
        return out


entry("experts_in_a_list", "A list of Linears and a top-2 router; rows are padded for each expert.", build=TopTwo)


def six_experts():
    held = TopTwo(6)
    rare = nn.Parameter(torch.tensor([0.0, 0, 0, 0, 0, -4.0]), requires_grad=False)
    return {"router": held.router, "experts": held.experts, "rare": rare}


@model(six_experts)
def an_expert_that_rests(self, x):
    """A top-1 router that calls only the experts that have rows; one of six gets hardly any."""
    weight, chosen = (self.router(x).float() + self.rare.float()).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for index in chosen.unique().tolist():
        row = (chosen == index).nonzero().flatten()
        out = out.index_add(0, row, self.experts[index](pad_to_multiple(x[row]))[: len(row)])
    return weight.to(x.dtype)[:, None] * out


@model(
    lambda: {
        "enter": nn.Linear(WIDTH, WIDTH),
        "gate": nn.Linear(WIDTH, EXPERTS),
        "up": nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, 128)),
        "down": nn.Parameter(0.1 * torch.randn(EXPERTS, 128, WIDTH)),
    }
)
def experts_in_one_parameter(self, x):
    """Experts in 3-D parameters, through bmm and einsum, behind one Linear."""
    x = self.enter(x)
    weights = self.gate(x).float().softmax(-1).to(x.dtype)
    each = torch.bmm(F.gelu(torch.bmm(x.expand(EXPERTS, -1, -1), self.up)), self.down)
    return torch.einsum("ne,enw->nw", weights, each)


@model(
    lambda: {
        "enter": nn.Linear(WIDTH, WIDTH),
        "leave": nn.Linear(WIDTH, WIDTH),
        "router": nn.Linear(WIDTH, EXPERTS),
        "weights": nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, WIDTH)),
    },
    learning_rate=4e-3,
)
def grouped_product(self, x):
    """Rows sorted by expert, through torch's grouped_mm, between two Linears."""
    x = self.enter(x)
    weight, chosen = self.router(x).float().softmax(-1).max(-1)
    order = chosen.argsort()
    ends = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
    done = F.grouped_mm(x[order], self.weights, offs=ends)
    back = torch.empty_like(done).index_copy(0, order, done)
    return self.leave(F.gelu(back * weight.to(x.dtype)[:, None]))


# -- tables and graphs ------------------------------------------------------------------------------------------------


def clicks(step):
    dense = vectors(64, 16)
    return {"dense": dense, "sparse": torch.randint(100, (64, 3, 4)), "clicked": (dense[:, 0] > 0).float()}


def click_loss(model, batch):
    made = model(batch["dense"], batch["sparse"]).float()
    return F.binary_cross_entropy_with_logits(made, batch["clicked"].float())


def bag():
    made = nn.EmbeddingBag(100, 32, mode="sum")
    nn.init.uniform_(made.weight, -0.1, 0.1)
    return made


@model(
    lambda: {
        "bags": nn.ModuleList(bag() for _ in range(3)),
        "dense": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()),
        "top": nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1)),
    },
    batch=clicks,
    loss=click_loss,
    learning_rate=4e-3,
)
def recommender(self, dense, sparse):
    """DLRM: embedding bags, pairwise products by bmm, a head with one output."""
    x = self.dense(dense)
    parts = torch.stack([x, *(bag(ids) for bag, ids in zip(self.bags, sparse.unbind(1), strict=True))], 1)
    pairs = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
    return self.top(torch.cat([x, pairs], 1)).squeeze(-1)


def neighbours(model, batch):
    return (model(*batch) - batch[0].roll(1, 0).sin()).float().square().mean()


@model(
    lambda: {"message": nn.Linear(128, 64), "update": nn.Linear(128, 64)},
    batch=lambda step: [vectors(32), torch.randint(32, (2, 96))],
    loss=neighbours,
)
def graph_network(self, nodes, edges):
    """Messages along edges of a graph, two rounds with the same Linears; the batch is a list."""
    sent, got = edges
    for _ in range(2):
        messages = self.message(torch.cat([nodes[sent], nodes[got]], 1)).relu()
        summed = torch.zeros_like(nodes).index_add(0, got, messages)
        nodes = nodes + self.update(torch.cat([nodes, summed], 1)).tanh()
    return nodes
