"""Models of controls that need one of their own: an odd layer, adapters, a hook. Built in an arm's process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.case import Case
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    import torch

MODEL = "micro"


def _micro() -> Any:
    from pytest_fp8.zoo import models

    return models.build(MODEL, seed=0, device="cpu")


def build_with_router() -> torch.nn.Module:
    """The micro model with a router of 10 outputs as the first child of each MLP, whose output the router weighs."""
    import torch

    from pytest_fp8.zoo.shapes import SHAPES

    class RoutedMlp(torch.nn.Module):
        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.router = torch.nn.Linear(SHAPES[MODEL].hidden, 10, bias=False, dtype=torch.bfloat16)
            self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            weight = 10 * self.router(given).softmax(-1).amax(-1, keepdim=True)
            mixed: torch.Tensor = weight * self.down_proj(
                torch.nn.functional.silu(self.gate_proj(given)) * self.up_proj(given)
            )
            return mixed

    model = _micro()
    for block in model.model.layers:
        block.mlp = RoutedMlp(block.mlp)
    return model  # type: ignore[no-any-return]


def build_with_adapters() -> torch.nn.Module:
    """The micro model with frozen weights and LoRA adapters of rank 16 on its attention, by peft."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(_micro(), adapters)  # type: ignore[no-any-return]


def build_tied() -> torch.nn.Module:
    """The micro model whose output projection is its embedding."""
    model = _micro()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model  # type: ignore[no-any-return]


def build_hooked() -> torch.nn.Module:
    """The micro model with a hook that halves the first block's output projection, as residual branches are scaled."""
    model = _micro()
    model.model.layers[0].self_attn.o_proj.register_forward_hook(_halved)
    return model  # type: ignore[no-any-return]


def _halved(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


def build_float_head() -> torch.nn.Module:
    """Eight Linears and a product in float32 at the end, which takes most of the step without TF32."""
    import torch

    class FloatHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)))
            self.head = torch.nn.Parameter(torch.randn(4096, 4096) / 64)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            inner: torch.Tensor = self.layers(given)
            loss: torch.Tensor = (inner.float() @ self.head.float()).square().mean()
            return loss

    return FloatHead()


def build_twice() -> torch.nn.Module:
    """Three Linears, of which the second hangs in two places and is called in both."""
    import torch

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
            self.first = self.again = torch.nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> Any:
            return self.leave(self.again(self.first(self.enter(x)).relu()).relu())

    return Twice()


def for_inference(model: torch.nn.Module) -> None:
    """Have the frozen Linears multiply by a copy of their weight in FP8, and go backward by its values in BF16."""
    import torch

    from pytest_fp8.backends.linears import reason_to_skip

    most = torch.finfo(torch.float8_e4m3fn).max

    def in_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.detach().float().abs().amax() / most
        return (tensor.detach().float() / scale).to(torch.float8_e4m3fn), scale

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(kept, scale)
            given, of_given = in_fp8(x)
            return torch._scaled_mm(given, kept.t(), scale_a=of_given, scale_b=scale, out_dtype=x.dtype)

        @staticmethod
        def backward(ctx: Any, *given: torch.Tensor) -> Any:
            kept, scale = ctx.saved_tensors
            return given[0] @ (kept.float() * scale).to(given[0].dtype), None, None

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        product: Any = Forward.apply
        out: torch.Tensor = product(x.reshape(-1, x.shape[-1]), *layer.kept)
        return out.reshape(*x.shape[:-1], -1)

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and reason_to_skip(name, layer.in_features, layer.out_features) is None:
            layer.kept = in_fp8(layer.weight)  # type: ignore[assignment]
            layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


def build_sister() -> torch.nn.Module:
    """Three layers whose steps take milliseconds: hundreds of them are a look of seconds."""
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))


def wide_rows(step: int) -> torch.Tensor:
    import torch

    return torch.randn(8192, 4096)


def text(step: int) -> dict[str, torch.Tensor]:
    """A batch of the micro model's usual size."""
    from pytest_fp8.zoo import data
    from pytest_fp8.zoo.shapes import SHAPES

    shape = SHAPES[MODEL]
    return data.text_batch(shape.batch, shape.seq, 0, step)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy per token (nats)."""
    from pytest_fp8.zoo import training

    return training.language_model_loss(compiled=False)(model, batch)


def build_looped() -> torch.nn.Module:
    """Two residual blocks with a norm, a dropout and a bias, which may recompute themselves. ``does`` names what the
    loop of :func:`looped` does in this arm alone."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(32)
            self.up, self.act, self.down = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
            self.drop = torch.nn.Dropout(0.1)
            self.recomputes, self.preserves = False, True

        def inner(self, x: torch.Tensor) -> Any:
            return self.down(self.drop(self.act(self.up(self.norm(x)))))

        def forward(self, x: torch.Tensor) -> Any:
            if not self.recomputes:
                return x + self.inner(x)
            return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserves)

    class Looped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.lm_head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.blocks = torch.nn.ModuleList([Block(), Block()])
            self.does = ""

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.enter(x[: len(x) // 2] if self.does == "half in the forward pass" else x)
            for block in self.blocks:
                hidden = block(hidden)
            return self.lm_head(hidden)

    return Looped()


def build_recomputing() -> torch.nn.Module:
    """The same, which recomputes in both arms."""
    model: Any = build_looped()
    for block in model.blocks:
        block.recomputes = True
    return model  # type: ignore[no-any-return]


def looped(model: Any, batch: torch.Tensor, optimizer: Any, precision: Any) -> torch.Tensor:
    """A step of two micro-batches, with clipping, logging or more of them where the model's ``does`` says so."""
    import torch

    rows = batch[:64] if model.does == "half in the step" else batch
    total, parts = torch.zeros(()), 4 if model.does == "four micro-batches" else 2
    for part in rows.chunk(parts):
        with precision():
            output = model(part)
            loss = (output - part[: len(output)]).float().pow(2).mean() / parts
        loss.backward()
        total += loss.detach()
    if model.does == "clips":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    if model.does == "logs":
        total.item()
    return total


def rows(step: int) -> torch.Tensor:
    """128 rows: halves and quarters are multiples of 16."""
    import torch

    return torch.randn(128, 32)


def shifted_rows(step: int) -> torch.Tensor:
    """Rows whose mean is not zero."""
    import torch

    return torch.randn(128, 32) + 0.5


def build_student() -> torch.nn.Module:
    """A student, and a teacher that follows it."""
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.teacher = nn.Linear(64, 64).requires_grad_(False)
            self.pairs = [(self.student[2].bias, self.teacher.bias)]

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.student(rows), self.teacher(rows)

    return Pair()


def rows_of_64(step: int) -> torch.Tensor:
    import torch

    return torch.randn(128, 64)


def follow(model: Any, batch: torch.Tensor, optimizer: torch.optim.Optimizer, precision: Any) -> torch.Tensor:
    """One step; afterwards the teacher follows the student."""
    import torch

    with precision():
        mine, teachers = model(batch)
        loss = (mine - batch.sin()).float().square().mean() + 0.1 * (mine - teachers).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for student, teacher in model.pairs:
            teacher.lerp_(student, 0.1)
    ended: torch.Tensor = loss.detach()
    return ended


def build_wide() -> torch.nn.Module:
    """Two layers, with more outputs between them than are compared of a product."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 1280), torch.nn.GELU(), torch.nn.Linear(1280, 64))


def squares(model: Any, given: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = (model(given) - given.sin()).float()
    return error.square().mean()


LOOPED = Workload(build=build_looped, batch=rows, step=looped)
RECOMPUTING = Workload(build=build_recomputing, batch=rows, step=looped)
ROUTER = Workload(build=build_with_router, batch=text, loss=loss)
ADAPTERS = Workload(build=build_with_adapters, batch=text, loss=loss)
TWICE = Workload(build=build_twice, batch=rows_of_64, loss=squares)
HOOKED = Workload(build=build_hooked, batch=text, loss=loss)
TIED = Workload(build=build_tied, batch=text, loss=loss)
FLOAT_HEAD = Workload(build=build_float_head, batch=wide_rows)
SHIFTED = Workload(build=build_looped, batch=shifted_rows, step=looped)
STUDENT = Workload(build=build_student, batch=rows_of_64, step=follow, leave=("teacher",), learning_rate=2e-3)
BIASED = Case("own", "torchao", "tensorwise", name="student", emulated=True, steps=20)
SISTER = Workload(build=build_sister, batch=rows_of_64, loss=squares)
LONG = Case("own", "torchao", "tensorwise", name="long", emulated=True, steps=300)
WIDE = Workload(build=build_wide, batch=rows_of_64, loss=squares)
WIDE_CASE = Case("own", "torchao", "tensorwise", name="wide", emulated=True, steps=20)
