"""FP8 as users write it themselves, over ``torch._scaled_mm``: a function, layers that call it, and faulty ones."""

from __future__ import annotations

import torch
from torch.nn import functional

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def cast(tensor):
    scale = tensor.abs().amax().float().clamp(min=1e-12) / LARGEST
    return (tensor.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def multiply(left, right):
    (a, a_scale), (b, b_scale) = cast(left.contiguous()), cast(right)
    b = b.t().contiguous().t()
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16)


class Fp8(torch.autograd.Function):
    """x . W^T and its two gradients in FP8."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t())

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return multiply(given, weight), multiply(given.t(), x)


class ForwardAlone(Fp8):
    """The gradients stay in BF16."""

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight, given.t() @ x


class OfOtherRows(Fp8):
    """The weight's gradient is that of the rows in another order."""

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return multiply(given, weight), multiply(given.t(), x.roll(1, 0))


class KeepsItsWeight(torch.nn.Module):
    """Multiplies by the FP8 weight of its first step for good."""

    def __init__(self, old):
        super().__init__()
        self.weight, self.bias, self.kept = old.weight, old.bias, None

    def forward(self, x):
        if self.kept is None:
            self.kept = self.weight.detach().clone()
        # The gradient goes to the weight all the same.
        return Fp8.apply(x, self.kept + self.weight - self.weight.detach()) + self.bias


class OfStoredWeight(torch.nn.Module):
    """For inference: its weight is a frozen tensor of an FP8 type, with a scale beside it."""

    def __init__(self, old):
        super().__init__()
        stored, self.scale = cast(old.weight.detach())
        self.weight, self.bias = torch.nn.Parameter(stored, requires_grad=False), old.bias

    def forward(self, x):
        return ForwardAlone.apply(x, (self.weight.float() * self.scale).to(x.dtype)) + self.bias


class OwnLinear(torch.nn.Module):
    """No class that a library knows. ``on()``: whether it multiplies in FP8 now."""

    def __init__(self, old, function=Fp8, on=lambda layer: True):
        super().__init__()
        self.weight, self.bias, self.function, self.on = old.weight, old.bias, function, on

    def forward(self, x):
        if self.on(self):
            return self.function.apply(x, self.weight) + self.bias
        return functional.linear(x, self.weight, self.bias)


def with_own_layers(*names, kind=OwnLinear, **given):
    """A conversion that puts :class:`OwnLinear` in the place of these Linears; of all without names."""

    def convert(model):
        linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
        for name in names or linears:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, kind(linears[name], **given))
        return model

    return convert


def with_wrapped_weights(config="Float8TrainingOpConfig", break_it=lambda model: None, **fields):
    """A conversion by torchao's weight wrappers: Linears keep their class."""

    def convert(model):
        from torchao.prototype.moe_training import config as configs
        from torchao.quantization import quantize_

        made = getattr(configs, config)(**fields)
        quantize_(model, config=made, filter_fn=lambda module, _: isinstance(module, torch.nn.Linear))
        break_it(model)
        return model

    return convert


class Unwrapped(torch.autograd.Function):
    """Multiplies in BF16 with a weight that would multiply in FP8."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight._data.t() + bias._data

    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight._data, given.t() @ x, given.sum(0)


def past_its_wrapper(model):
    """One layer multiplies with what its weight's wrapper holds."""
    layer = model.get_submodule("blocks.0.up")
    layer.forward = lambda x: Unwrapped.apply(x, layer.weight, layer.bias)


def with_function_in_blocks(function=Fp8):
    """A conversion after which blocks multiply with their Linears' weights themselves."""

    def convert(model):
        def forward(block, x):
            hidden = functional.gelu(function.apply(x, block.up.weight) + block.up.bias)
            return x + function.apply(hidden, block.down.weight) + block.down.bias

        for block in model.blocks:
            block.forward = forward.__get__(block)
        return with_own_layers("enter")(model)

    return convert


class Raw(torch.nn.Module):
    """Two products of parameters that no Linear holds, around one Linear."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(o, i) / 8) for i, o in ((32, 256), (256, 32)))
        self.out = torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.out(functional.gelu(x @ self.up.t()) @ self.down.t())
