"""FP8 that is nobody's class: own layers and functions over ``torch._scaled_mm``, weights that are wrapped, and layers
that several ranks have parts of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.healthy.sound import Net, apart, backward, entry, finish

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(tensor: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and what they are to be multiplied by, by one scale of the whole tensor."""
    most = torch.finfo(kind).max
    scale = most / tensor.float().abs().max().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-most, most).to(kind), scale.reciprocal()


def by_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


class Product(torch.autograd.Function):
    """x . W^T as nanochat has it: its FP8 operands are kept for the backward pass, gradients are in E5M2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (a, of_a), (b, of_b) = to_fp8(x, E4M3), to_fp8(weight, E4M3)
        ctx.save_for_backward(a, of_a, b, of_b)
        return torch._scaled_mm(a, b.t(), scale_a=of_a, scale_b=of_b, out_dtype=x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        a, of_a, b, of_b = ctx.saved_tensors
        g, of_g = to_fp8(given[0], E5M2)
        kind = given[0].dtype
        dx = torch._scaled_mm(g, by_columns(b), scale_a=of_g, scale_b=of_b, out_dtype=kind)
        dw = torch._scaled_mm(g.t().contiguous(), by_columns(a), scale_a=of_g, scale_b=of_a, out_dtype=kind)
        return dx, dw


class AtRandom(Product):
    """Gradients are rounded up or down at random."""

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        apart = torch.finfo(E5M2).eps * given[0].float().abs().log2().floor().exp2()
        return Product.backward(ctx, (given[0] + apart * (torch.rand_like(apart) - 0.5)).to(given[0].dtype))


class Float8Linear(nn.Linear):
    """nanochat's: an nn.Linear whose products are its own function's."""

    def __init__(self, old: nn.Linear, function: type[Product] = Product) -> None:
        super().__init__(old.in_features, old.out_features, device="meta")
        self.weight, self.bias, self.function = old.weight, old.bias, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.function.apply(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)
        return out + self.bias


def with_own_layers(*names: str, kind: Any = Float8Linear, **given: Any) -> Callable[[nn.Module], nn.Module]:
    """A conversion that puts layers of this kind in the place of these Linears; of all without names."""

    def convert(model: nn.Module) -> nn.Module:
        linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
        for name in names or linears:
            model.set_submodule(name, kind(linears[name], **given))
        return model

    return convert


def with_own_function(model: Any) -> None:
    """The model's forward pass multiplies with its Linears' weights by itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        inner = Product.apply(F.gelu(Product.apply(x, self.up.weight) + self.up.bias), self.down.weight)
        mixed = self.norm(x + self.dropout(inner + self.down.bias))
        return Product.apply(mixed, self.last.weight) + self.last.bias

    model.forward = forward.__get__(model)


def with_wrapped_weights(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    """A conversion by torchao's training wrappers: Linears keep their class, and their weights multiply in FP8."""

    def convert(model: nn.Module) -> nn.Module:
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization import quantize_

        wrapped = Float8TrainingOpConfig(**fields)
        quantize_(model, config=wrapped, filter_fn=lambda module, _: isinstance(module, nn.Linear))
        return model

    return convert


TENSORWISE = ("tensorwise",)
for _name, _what, _convert, _options in (
    ("layers", "nanochat's layers: own autograd function over _scaled_mm.", with_own_layers(), {}),
    (
        "at_random",
        "The same, with gradients that are rounded at random.",
        with_own_layers(function=AtRandom),
        # 3 dB coarser than the nearest values: docs/own-models.md.
        {"questions": ("layers", "loss", "checkpoints")},
    ),
    ("function", "A function over _scaled_mm, called past the Linears.", with_own_function, {}),
    (
        "weight_wrappers",
        "torchao's weight wrappers; Linears keep their class.",
        with_wrapped_weights(float8_linear_recipe="tensorwise"),
        # They cannot be written: safetensors and torch.save fail on them, too.
        {"questions": ("layers", "numerics", "loss")},
    ),
):
    entry(f"own_fp8_{_name}", _what, _options, TENSORWISE, convert=_convert)


# -- Megatron's parallel layers ---------------------------------------------------------------------------------------


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


class Sum(torch.autograd.Function):
    """Over the ranks: of the forward pass's values, or of the backward pass's gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of_values: bool) -> torch.Tensor:
        ctx.of_values = of_values
        return summed(x) if of_values else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        return given[0] if ctx.of_values else summed(given[0]), None


class Parallel(nn.Module):
    """This rank's part of a Linear's weight: of its outputs, or of its inputs."""

    def __init__(self, whole: nn.Linear, dim: int) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, dim)[rank].clone())
        bias = whole.bias.detach()
        self.bias = nn.Parameter(bias.chunk(ranks)[rank].clone() if dim == 0 else bias.clone())
        # Of the bias each rank has a part where it has some of the outputs.
        for part in (self.weight, *([self.bias] if dim == 0 else [])):
            part.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.by_rows, self.fp8 = dim == 1, False

    def forward(self, x: torch.Tensor) -> Any:
        x = x if self.by_rows else Sum.apply(x, False)
        out = Product.apply(x, self.weight) if self.fp8 else F.linear(x, self.weight)
        return (Sum.apply(out, True) if self.by_rows else out) + self.bias


def part_of_net() -> nn.Module:
    net = Net()
    net.up, net.down = Parallel(net.up, 0), Parallel(net.down, 1)  # type: ignore[assignment]
    return net


def parallel_in_fp8(model: Any) -> None:
    model.up.fp8 = model.down.fp8 = True
    with_own_layers()(model)


class AddsByItself(Product):
    """The weight's gradient is added to its parameter's in the layer's own backward pass, as Apex and Megatron do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return Product.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        dx, dw = Product.backward(ctx, *given)
        ctx.weight.grad = dw if ctx.weight.grad is None else ctx.weight.grad + dw
        return dx, None


def in_two_parts(model: Any, x: torch.Tensor, optimizer: Any, precision: Any) -> Any:
    losses = [backward(lambda model, x: apart(model, x) / 2, model, part, precision) for part in x.chunk(2)]
    finish(optimizer)
    return sum(losses)


entry(
    "adds_its_gradient_by_itself",
    "Own layers that add to their weights' gradients, over two micro-batches.",
    recipes=TENSORWISE,
    step=in_two_parts,
    convert=with_own_layers(function=AddsByItself),
)


entry(
    "tensor_parallel",
    "Megatron's column and row parallel layers on two ranks, which share one batch.",
    {"gpus": 2, "parallel": "own", "questions": ("layers", "numerics", "loss")},
    recipes=TENSORWISE,
    build=part_of_net,
    loss=apart,
    convert=parallel_in_fp8,
    parallelize=lambda model, mesh: model,
)
