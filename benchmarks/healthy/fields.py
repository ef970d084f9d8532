"""Tables of embeddings, fields of coordinates, graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import of, vectors


class Recommender(nn.Module):
    """DLRM: bags of embeddings, their pairwise products, two towers of Linears."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(100, 32, mode="sum") for _ in range(3))
        for bag in self.bags:
            nn.init.uniform_(bag.weight, -0.1, 0.1)
        self.dense = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense, sparse):
        x = self.dense(dense)
        parts = torch.stack([x, *(bag(ids) for bag, ids in zip(self.bags, sparse.unbind(1), strict=True))], 1)
        pairs = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, pairs], 1)).squeeze(-1)


def recommender_batch(step):
    dense = vectors(64, 16)
    return {"dense": dense, "sparse": torch.randint(100, (64, 3, 4)), "clicked": (dense[:, 0] > 0).float()}


@of("loss", build=Recommender, batch=recommender_batch, learning_rate=4e-3)
def recommender(model, batch):
    """Embedding bags, pairwise products by bmm, a head with one output."""
    made = model(batch["dense"], batch["sparse"]).float()
    return F.binary_cross_entropy_with_logits(made, batch["clicked"].float())


class Graph(nn.Module):
    """Messages along edges: rows are gathered, changed and added."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, nodes, edges):
        sent, got = edges
        for _ in range(2):
            messages = self.message(torch.cat([nodes[sent], nodes[got]], 1)).relu()
            summed = torch.zeros_like(nodes).index_add(0, got, messages)
            nodes = nodes + self.update(torch.cat([nodes, summed], 1)).tanh()
        return nodes


@of("loss", build=Graph, batch=lambda step: [vectors(32), torch.randint(32, (2, 96))])
def graph_network(model, batch):
    """Messages along edges of a graph, two rounds with the same Linears; the batch is a list."""
    nodes, edges = batch
    return (model(nodes, edges) - nodes.roll(1, 0).sin()).float().square().mean()
