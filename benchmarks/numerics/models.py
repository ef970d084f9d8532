"""Sound models that strain the numerics question: outliers, a layer called often, routers, normalised depths."""

from __future__ import annotations

from pytest_fp8 import Workload


def outliers():
    """Four of 128 channels are 200 times as large as the others, as in trained language models."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            scale = torch.ones(128)
            scale[::37] = 200.0
            self.register_buffer("scale", scale)

        def forward(self, x):
            return x * self.scale

    def build():
        return nn.Sequential(Scaled(), nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128))

    return Workload(build=build, batch=lambda step: torch.randn(256, 128), loss=squares)


def squares(model, batch):
    return (model(batch) - batch).float().pow(2).mean()


def often():
    """One layer called eight times in a step, as in a recurrent net."""
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.again, self.leave = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)

        def forward(self, x):
            state = self.enter(x)
            for _ in range(8):
                state = torch.tanh(self.again(state) + state)
            return self.leave(state)

    return Workload(build=Recurrent, batch=lambda step: torch.randn(64, 64), loss=squares)


def routed():
    """A router that sends each token to one of four experts: small changes send some another way."""
    import torch
    from torch import nn

    from pytest_fp8 import pad_to_multiple

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.router = nn.Linear(64, 64), nn.Linear(64, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
            )

        def forward(self, x):
            x = self.enter(x)
            weights, chosen = self.router(x).float().softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                mine = (chosen == index).nonzero().flatten()
                out = out.index_add(0, mine, expert(pad_to_multiple(x[mine]))[: len(mine)])
            return x + weights.to(x.dtype)[:, None] * out

    return Workload(build=Routed, batch=lambda step: torch.randn(256, 64), loss=squares)


def deep():
    """Sixteen residual blocks with dropout."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x):
            return x + nn.functional.dropout(self.down(nn.functional.silu(self.up(self.norm(x)))), 0.1, self.training)

    def build():
        return nn.Sequential(*(Block() for _ in range(16)))

    return Workload(build=build, batch=lambda step: torch.randn(128, 64), loss=squares)


OWN = {"outliers": outliers, "often": often, "routed": routed, "deep": deep}
"""Name -> the function that makes the workload."""
