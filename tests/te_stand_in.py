"""Stands in for ``transformer_engine`` where it is not installed: layers that compute in BF16, recipes, an autocast."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn


class BaseModule(nn.Module):
    """The library's layers keep scaling state in the state dict."""

    def get_extra_state(self):
        return torch.ones(3, dtype=torch.uint8)

    def set_extra_state(self, state): ...


class Linear(BaseModule, nn.Linear):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)
        if not bias:
            # The library's layer has an empty tensor here, which is no parameter.
            del self._parameters["bias"]
            self.bias = torch.Tensor()

    def forward(self, inp):
        return nn.functional.linear(inp, self.weight, self.bias if self.bias.numel() else None)


class RMSNorm(nn.Module):
    get_extra_state, set_extra_state = BaseModule.get_extra_state, BaseModule.set_extra_state

    def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def forward(self, inp):
        wide = inp.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(inp.dtype)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Enough of the library to be converted to, and to train in BF16, for as long as the context is open."""
    state = SimpleNamespace(recipe=None)

    class Manager:
        is_fp8_enabled = staticmethod(lambda: state.recipe is not None)
        get_fp8_recipe = staticmethod(lambda: state.recipe)

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        state.recipe, before = recipe if enabled else None, state.recipe
        yield
        state.recipe = before

    def recipe(name):
        def start(self, **options):
            self.__dict__.update(options)

        return type(name, (), {"__init__": start})

    recipes = {name: recipe(name) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}
    formats = SimpleNamespace(HYBRID=SimpleNamespace(name="HYBRID"))
    usable = {name: lambda return_reason: (True, "") for name in ("is_fp8_available", "is_mxfp8_available")}
    contents = {
        "transformer_engine.common.recipe": {**recipes, "MXFP8BlockScaling": None, "Format": formats},
        "transformer_engine.pytorch": {"Linear": Linear, "RMSNorm": RMSNorm, "autocast": autocast, **usable}
        | {"is_fp8_block_scaling_available": usable["is_fp8_available"]},
        "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": BaseModule},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": Manager},
    }
    with pytest.MonkeyPatch.context() as patch:
        for path, names in contents.items():
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                if name not in sys.modules or not getattr(sys.modules[name], "stands_in", False):
                    made = ModuleType(name)
                    made.stands_in = True
                    patch.setitem(sys.modules, name, made)
                    if depth > 1:
                        setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], made)
            vars(sys.modules[path]).update(names)
        yield
