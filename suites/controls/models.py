"""Models of controls that need one of their own: an odd layer, adapters, a hook. Built in an arm's process alone.

A name in capitals is what a control states of its model: the workload, and its case where that is no usual one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controls.control import micro, torch
from pytest_fp8.case import Case
from pytest_fp8.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor, nn

OWN = micro(model="own")


# -- the micro model, changed -----------------------------------------------------------------------------------------


def _micro() -> Any:
    from pytest_fp8.zoo import models

    return models.build("micro", seed=0, device="cpu")


def build_with_router() -> nn.Module:
    """A router of 10 outputs is the first child of each MLP, whose output the router weighs."""
    from pytest_fp8.zoo.shapes import SHAPES

    class RoutedMlp(torch.nn.Module):
        def __init__(self, mlp: Any) -> None:
            super().__init__()
            self.router = torch.nn.Linear(SHAPES["micro"].hidden, 10, bias=False, dtype=torch.bfloat16)
            self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

        def forward(self, given: Tensor) -> Any:
            weight = 10 * self.router(given).softmax(-1).amax(-1, keepdim=True)
            return weight * self.down_proj(torch.nn.functional.silu(self.gate_proj(given)) * self.up_proj(given))

    model = _micro()
    for block in model.model.layers:
        block.mlp = RoutedMlp(block.mlp)
    return model  # type: ignore[no-any-return]


def build_with_adapters() -> nn.Module:
    """Frozen weights and LoRA adapters of rank 16 on its attention, by peft."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(_micro(), adapters)  # type: ignore[no-any-return]


def build_tied() -> nn.Module:
    """Its output projection is its embedding."""
    model = _micro()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model  # type: ignore[no-any-return]


def build_hooked() -> nn.Module:
    """A hook halves the first block's output projection, as residual branches are scaled."""
    model = _micro()
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda layer, given, output: output / 2)
    return model  # type: ignore[no-any-return]


def text(step: int) -> dict[str, Tensor]:
    """A batch of the micro model's usual size."""
    from pytest_fp8.zoo import data
    from pytest_fp8.zoo.shapes import SHAPES

    return data.text_batch(SHAPES["micro"].batch, SHAPES["micro"].seq, 0, step)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy per token (nats)."""
    from pytest_fp8.zoo import training

    return training.language_model_loss(compiled=False)(model, batch)


def _of_text(build: Any, **more: Any) -> dict[str, Any]:
    return {"workload": Workload(build=build, batch=text, loss=loss), "case": OWN, **more}


ROUTER, HOOKED, TIED = _of_text(build_with_router), _of_text(build_hooked), _of_text(build_tied)
ADAPTERS = _of_text(build_with_adapters, needs=("peft",))

# -- small models of a few Linears ------------------------------------------------------------------------------------


def rows_of_64(step: int) -> Tensor:
    return torch.randn(128, 64)


def padded_rows(step: int) -> Tensor:
    """Eight of them are padding."""
    rows = torch.randn(128, 64)
    rows[-8:] = 1e6
    return rows


def squares(model: Any, given: Tensor) -> Tensor:
    return (model(given) - given.sin()).float().square().mean()  # type: ignore[no-any-return]


def squares_but_pads(model: Any, given: Tensor) -> Tensor:
    return (model(given) - given.sin())[:-8].float().square().mean()  # type: ignore[no-any-return]


def build_twice() -> nn.Module:
    """Three Linears, of which the second hangs in two places and is called in both."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
            self.first = self.again = torch.nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Any:
            return self.leave(self.again(self.first(self.enter(x)).relu()).relu())

    return Twice()


def build_long() -> nn.Module:
    """Three layers whose steps take milliseconds: hundreds of them are a look of seconds."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))


def build_wide() -> nn.Module:
    """Two layers, with more outputs between them than are compared of a product."""
    return torch.nn.Sequential(torch.nn.Linear(64, 1280), torch.nn.GELU(), torch.nn.Linear(1280, 64))


def build_student() -> nn.Module:
    """A student, and a teacher that follows it."""
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
            self.teacher = nn.Linear(64, 64).requires_grad_(False)
            self.pairs = [(self.student[2].bias, self.teacher.bias)]

        def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            return self.student(rows), self.teacher(rows)

    return Pair()


def follow(model: Any, batch: Tensor, optimizer: torch.optim.Optimizer, precision: Any) -> Tensor:
    """One step; afterwards the teacher follows the student."""
    with precision():
        mine, teachers = model(batch)
        loss: Tensor = (mine - batch.sin()).float().square().mean() + 0.1 * (mine - teachers).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for student, teacher in model.pairs:
            teacher.lerp_(student, 0.1)
    return loss.detach()


def _own(name: str, steps: int, *functions: Any, **more: Any) -> dict[str, Any]:
    case = Case("own", "torchao", "tensorwise", name=name, emulated=True, steps=steps)
    return {"workload": Workload(*functions, **more), "case": case}


TWICE: dict[str, Any] = {"workload": Workload(build_twice, rows_of_64, squares), "case": OWN}
PADDED = _own("padded", 20, build_long, padded_rows, squares_but_pads)
LONG = _own("long", 300, build_long, rows_of_64, squares)
WIDE = _own("wide", 20, build_wide, rows_of_64, squares)
STUDENT = _own("student", 20, build_student, rows_of_64, step=follow, leave=("teacher",), learning_rate=2e-3)


# -- a loop -----------------------------------------------------------------------------------------------------------


def build_looped() -> nn.Module:
    """Two residual blocks with a norm, a dropout and a bias, which may recompute themselves. ``does`` names what the
    loop of :func:`looped` does in this arm alone."""
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(32)
            self.up, self.act, self.down = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
            self.drop = torch.nn.Dropout(0.1)
            self.recomputes, self.preserves = False, True

        def inner(self, x: Tensor) -> Any:
            return self.down(self.drop(self.act(self.up(self.norm(x)))))

        def forward(self, x: Tensor) -> Any:
            if not self.recomputes:
                return x + self.inner(x)
            return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserves)

    class Looped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.lm_head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.blocks = torch.nn.ModuleList([Block(), Block()])
            self.does, self.bound = "", 0.0

        def forward(self, x: Tensor) -> Any:
            hidden = self.enter(x)
            for block in self.blocks:
                hidden = block(hidden)
            return self.lm_head(hidden)

    return Looped()


def build_recomputing() -> nn.Module:
    """The same, which recomputes in both arms."""
    model: Any = build_looped()
    for block in model.blocks:
        block.recomputes = True
    return model  # type: ignore[no-any-return]


def looped(model: Any, batch: Tensor, optimizer: Any, precision: Any) -> Tensor:
    """A step of two micro-batches, with clipping where there is a bound, and what the model's ``does`` says."""
    rows = batch[:64] if model.does == "half in the step" else batch
    total = torch.zeros(())
    for part in rows.chunk(2):
        with precision():
            loss = (model(part) - part).float().pow(2).mean() / 2
        loss.backward()
        total += loss.detach()
    if model.bound:
        torch.nn.utils.clip_grad_norm_(model.parameters(), model.bound)
    optimizer.step()
    optimizer.zero_grad()
    if model.does == "logs":
        total.item()
    return total


def by_hand(model: Any, batch: Tensor, optimizer: Any, precision: Any) -> Tensor:
    """A step that gives each weight its gradient by itself, from ``torch.autograd.grad()``."""
    with precision():
        loss: Tensor = (model(batch) - batch).float().pow(2).mean()
    weights = list(model.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def rows(step: int) -> Tensor:
    """128 rows: halves and quarters are multiples of 16."""
    return torch.randn(128, 32)


def shifted_rows(step: int) -> Tensor:
    """Rows whose mean is not zero."""
    return torch.randn(128, 32) + 0.5


LOOPED = Workload(build=build_looped, batch=rows, step=looped)
RECOMPUTING = Workload(build=build_recomputing, batch=rows, step=looped)
SHIFTED = Workload(build=build_looped, batch=shifted_rows, step=looped)
BY_HAND = _own("by-hand", 20, build_looped, rows, step=by_hand)
