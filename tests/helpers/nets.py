"""Small models in a line or two, torchao's own conversion of them, and optimizers that run the step's forward and
backward pass themselves (LBFGS, SAM) with a step that uses them."""

from __future__ import annotations


def net(forward, **parts):
    """A model of these parts, each a module or a Linear's sizes, that computes ``forward(model, x)``."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, nn.Linear(*part) if isinstance(part, tuple) else part)

        def forward(self, x):
            return forward(self, x)

    return Net()


def by_torchao(but=(), then=lambda model: None, **config):
    """A conversion of all Linears ``but`` these, which changes the model ``then``."""

    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = Float8LinearConfig(emulate=True, **config)
        converted = convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, name: name not in but)
        then(converted)
        return converted

    return convert


def lbfgs(parameters):
    """Calls its closure twice in each step."""
    import torch

    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


def sam(parameters):
    """Sharpness-aware minimisation: a second gradient from weights that are moved and then restored."""
    import torch

    class SAM(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            weights = [p for group in self.param_groups for p in group["params"]]
            before = [p.clone() for p in weights]
            for p in weights:
                p.add_(p.grad, alpha=0.05)
            with torch.enable_grad():
                closure()
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)
            super().step()
            return loss

    return SAM(parameters, lr=0.1)


def closing(keyword=False):
    """A step whose optimizer is given a closure, by position or by ``keyword``."""

    def step(model, batch, optimizer, precision):
        def closure():
            optimizer.zero_grad()
            with precision():
                loss = (model(batch) - batch).float().pow(2).mean()
            loss.backward()
            return loss

        return (optimizer.step(closure=closure) if keyword else optimizer.step(closure)).detach()

    return step
