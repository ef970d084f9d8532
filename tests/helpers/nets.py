"""Small models in a line or two, and torchao's own conversion of them."""

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
