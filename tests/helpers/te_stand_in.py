"""Stands in for ``transformer_engine`` where it is not installed: layers that compute in BF16, recipes, an autocast."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
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


def checkpointing(state, autocast):
    """The library's activation checkpointing: hooks of its own, the context taken along, each forward pass queued."""
    home, hooks = "transformer_engine.pytorch.distributed", torch.autograd.graph.saved_tensors_hooks

    class _recomputation_hook(hooks):
        def __init__(self, kept):
            def pack_hook(x):
                kept.append(x.detach())
                return x.detach()

            super().__init__(pack_hook, lambda x: x)

    class _CheckpointFunction(torch.autograd.Function):
        """Reentrant: the first pass without gradients, the second with them in the backward pass."""

        @staticmethod
        def forward(ctx, function, distribute, tracker, group, context_fn, kwargs, *args):
            ctx.function, ctx.kwargs, ctx.recipe = function, kwargs, state.recipe
            ctx.save_for_backward(*args)
            with torch.no_grad(), context_fn()[0]:
                return function(*args, **kwargs)

        @staticmethod
        def backward(ctx, *gradients):
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad(), autocast(ctx.recipe is not None, ctx.recipe):
                outputs = ctx.function(*inputs, **ctx.kwargs)
            torch.autograd.backward(outputs, *gradients)
            return (None,) * 6 + tuple(x.grad for x in inputs)

    def nothing():
        return contextlib.nullcontext(), contextlib.nullcontext()

    def checkpoint(function, *args, use_reentrant=True, context_fn=nothing, **kwargs):
        if use_reentrant:
            reentrant = sys.modules[home]._CheckpointFunction
            return reentrant.apply(function, False, None, None, context_fn, kwargs, *args)
        recipe, kept, dropped = state.recipe, [], []

        def pack_hook(x):
            dropped.append(None)
            return len(dropped) - 1

        def unpack_hook(index):
            if not kept:
                hook = sys.modules[home]._recomputation_hook
                state.fp8_tensors_recompute_buffer[0].popleft()
                with hook(kept), torch.enable_grad(), autocast(recipe is not None, recipe):
                    function(*args, **kwargs)
            return kept[index]

        pack_hook.__module__ = home
        state.fp8_tensors_recompute_buffer[0].append(recipe)
        with hooks(pack_hook, unpack_hook):
            return function(*args, **kwargs)

    recompute = type("activation_recompute_forward", (), {"_is_first_fp8_module": []})
    names = {"_recomputation_hook": _recomputation_hook, "_CheckpointFunction": _CheckpointFunction}
    return {"checkpoint": checkpoint}, {**names, "activation_recompute_forward": recompute}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Enough of the library to be converted to, and to train in BF16, for as long as the context is open."""
    state = SimpleNamespace(recipe=None, fp8_tensors_recompute_buffer=[deque()])

    class Manager:
        is_fp8_enabled = staticmethod(lambda: state.recipe is not None)
        get_fp8_recipe = staticmethod(lambda: state.recipe)
        quantization_state = state

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
    checkpoint, hooks = checkpointing(state, autocast)
    usable = {name: lambda return_reason: (True, "") for name in ("is_fp8_available", "is_mxfp8_available")}
    contents = {
        "transformer_engine.common.recipe": {**recipes, "MXFP8BlockScaling": None, "Format": formats},
        "transformer_engine.pytorch": {
            "Linear": Linear,
            "RMSNorm": RMSNorm,
            "autocast": autocast,
            **usable,
            **checkpoint,
        }
        | {"is_fp8_block_scaling_available": usable["is_fp8_available"]},
        "transformer_engine.pytorch.distributed": hooks,
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
