"""Mixtures of experts, each kind as people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import built, entry
from pytest_fp8 import pad_to_multiple

WIDTH, EXPERTS = 64, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class TopTwo(nn.Module):
    """Two experts of four for each row; each expert's rows are padded."""

    def __init__(self, count=EXPERTS):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(count))

    def forward(self, x):
        weights, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = (chosen == index).nonzero(as_tuple=True)
            given = pad_to_multiple(x[row])
            out = out.index_add(0, row, weights[row, place, None].to(x.dtype) * expert(given)[: len(row)])
        return out


entry("experts_in_a_list", "A list of Linears and a top-2 router; rows are padded for each expert.", build=TopTwo)


@built("an_expert_that_rests", "A top-1 router that calls only the experts that have rows.")
class Resting(TopTwo):
    """Experts without rows are not called; one of six gets hardly any."""

    def __init__(self):
        super().__init__(6)
        self.rare = nn.Parameter(torch.tensor([0.0, 0, 0, 0, 0, -4.0]), requires_grad=False)

    def forward(self, x):
        weight, chosen = (self.router(x).float() + self.rare.float()).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            row = (chosen == index).nonzero().flatten()
            out = out.index_add(0, row, self.experts[index](pad_to_multiple(x[row]))[: len(row)])
        return weight.to(x.dtype)[:, None] * out


@built("experts_in_one_parameter", "Experts in 3-D parameters, through bmm and einsum, behind one Linear.")
class Stacked(nn.Module):
    """All experts in two 3-D parameters, multiplied by ``bmm``; every expert sees every row."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, 128))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, 128, WIDTH))

    def forward(self, x):
        x = self.enter(x)
        weights = self.gate(x).float().softmax(-1).to(x.dtype)
        each = torch.bmm(F.gelu(torch.bmm(x.expand(EXPERTS, -1, -1), self.up)), self.down)
        return torch.einsum("ne,enw->nw", weights, each)


@built("grouped_product", "Rows sorted by expert, through torch's grouped_mm, between two Linears.", learning_rate=4e-3)
class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weights = nn.Parameter(0.1 * torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        x = self.enter(x)
        weight, chosen = self.router(x).float().softmax(-1).max(-1)
        order = chosen.argsort()
        ends = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
        done = F.grouped_mm(x[order], self.weights, offs=ends)
        back = torch.empty_like(done).index_copy(0, order, done)
        return self.leave(F.gelu(back * weight.to(x.dtype)[:, None]))
