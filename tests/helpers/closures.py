"""Optimizers that run the step's forward and backward pass themselves (LBFGS, SAM), and a step that uses them."""

from __future__ import annotations


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
