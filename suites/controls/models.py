"""Models of controls that need one of their own: an odd layer, adapters, a hook. Built in an arm's process alone.

A name in capitals is what a control states of its model: the workload, and its case where that is no usual one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from controls.control import Tensor, micro, torch
from pytest_fp8.case import Case
from pytest_fp8.workload import Workload

ADAPTERS: dict[str, Any] = {"case": micro(lora=16, lora_targets=("q_proj", "v_proj")), "needs": ("peft",)}

# -- the micro model, changed -----------------------------------------------------------------------------------------


def _changed(change: Callable[[Any], Any], **more: Any) -> dict[str, Any]:
    """The micro model with its usual batches and its loss in nats; ``change`` is given each that is built."""

    def build() -> torch.nn.Module:
        from pytest_fp8.zoo import models

        model = models.build("micro", seed=0, device="cpu")
        change(model)
        return model

    def batch(step: int) -> dict[str, Tensor]:
        from pytest_fp8.zoo import data
        from pytest_fp8.zoo.shapes import SHAPES

        return data.text_batch(SHAPES["micro"].batch, SHAPES["micro"].seq, 0, step)

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        from pytest_fp8.zoo import training

        return training.language_model_loss(compiled=False)(model, batch)

    return {"workload": Workload(build, batch, loss), "case": micro(model="own", **more)}


def _with_routers(model: Any) -> None:
    """A router of 10 outputs is the first child of each MLP, whose output it weighs."""

    def weighed(mlp: Any, given: tuple[Tensor], output: Tensor) -> Any:
        return 10 * mlp.router(*given).softmax(-1).amax(-1, keepdim=True) * output

    for block in model.model.layers:
        router = torch.nn.Linear(model.config.hidden_size, 10, bias=False, dtype=torch.bfloat16)
        block.mlp._modules = {"router": router, **block.mlp._modules}
        block.mlp.register_forward_hook(weighed)


def _with_halved_residual(model: Any) -> None:
    """A hook halves the first block's output projection, as residual branches are scaled."""
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda layer, given, output: output / 2)


ROUTER, HOOKED = _changed(_with_routers), _changed(_with_halved_residual)
# Its output projection is its embedding.
TIED = _changed(lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight), resume=False)

# -- small models of a few Linears ------------------------------------------------------------------------------------


def chain(*sizes: int) -> torch.nn.Sequential:
    """Linears of these sizes, with GELU between them."""
    nn = torch.nn
    first, *others = (nn.Linear(size, next) for size, next in pairwise(sizes))
    return nn.Sequential(first, *(layer for linear in others for layer in (nn.GELU(), linear)))


def build_twice() -> torch.nn.Module:
    """Three Linears, of which the second hangs in two places and is called in both."""
    nn, again = torch.nn, torch.nn.Linear(128, 128)
    return nn.Sequential(
        OrderedDict(enter=nn.Linear(64, 128), first=again, act=nn.ReLU(), again=again, leave=nn.Linear(128, 64))
    )


def build_student() -> torch.nn.Module:
    """A student, and a teacher that follows it."""
    from torch import nn

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = chain(64, 128, 64), nn.Linear(64, 64).requires_grad_(False)
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


def rows(step: int) -> Tensor:
    return torch.randn(128, 64)


def padded_rows(step: int) -> Tensor:
    """Eight of them are padding."""
    return torch.cat([torch.randn(120, 64), torch.full((8, 64), 1e6)])


def squares(model: Any, given: Tensor, padding: int | None = None) -> Tensor:
    return (model(given) - given.sin())[:padding].float().square().mean()  # type: ignore[no-any-return]


def _own(name: str, build: Any, batch: Any = rows, loss: Any = squares, steps: int = 20, **more: Any) -> dict[str, Any]:
    case = Case("own", "torchao", "tensorwise", name=name, emulated=True, steps=steps)
    return {"workload": Workload(build, batch, None if "step" in more else loss, **more), "case": case}


TWICE = _own("twice", build_twice)
# Steps take milliseconds: hundreds of them are a look of seconds.
LONG = _own("long", lambda: chain(64, 128, 128, 64), steps=300)
PADDED = _own("padded", lambda: chain(64, 128, 128, 64), padded_rows, lambda model, given: squares(model, given, -8))
# More outputs between its layers than are compared of a product.
WIDE = _own("wide", lambda: chain(64, 1280, 64))
STUDENT = _own("student", build_student, step=follow, leave=("teacher",), learning_rate=2e-3)

# -- a loop -----------------------------------------------------------------------------------------------------------


def build_looped(**settings: Any) -> torch.nn.Module:
    """Two residual blocks with a norm, a dropout and a bias. ``settings``: those of the loop (:func:`looped`), and
    whether the blocks recompute themselves with the same random numbers."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    usual = {"rows": None, "bound": 0.0, "logs": False, "recomputes": False, "preserves": True}
    chosen = SimpleNamespace(**{**usual, **settings})

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)
            self.drop, self.settings = nn.Dropout(0.1), chosen

        def inner(self, x: Tensor) -> Any:
            return self.down(self.drop(self.act(self.up(self.norm(x)))))

        def forward(self, x: Tensor) -> Any:
            if not self.settings.recomputes:
                return x + self.inner(x)
            return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.settings.preserves)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.lm_head = nn.Linear(32, 32), nn.Linear(32, 32)
            self.blocks, self.settings = nn.ModuleList([Block(), Block()]), chosen

        def forward(self, x: Tensor) -> Any:
            hidden = self.enter(x)
            for block in self.blocks:
                hidden = block(hidden)
            return self.lm_head(hidden)

    return Looped()


def looped(model: Any, batch: Tensor, optimizer: Any, precision: Any) -> Tensor:
    """A step of two micro-batches of the first ``rows``, with clipping where there is a ``bound``; it may log."""
    total = torch.zeros(())
    for part in batch[: model.settings.rows].chunk(2):
        with precision():
            loss = (model(part) - part).float().pow(2).mean() / 2
        loss.backward()
        total += loss.detach()
    if model.settings.bound:
        torch.nn.utils.clip_grad_norm_(model.parameters(), model.settings.bound)
    optimizer.step()
    optimizer.zero_grad()
    if model.settings.logs:
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


def narrow_rows(step: int) -> Tensor:
    """128 of them: halves and quarters are multiples of 16."""
    return torch.randn(128, 32)


LOOPED = Workload(build_looped, narrow_rows, step=looped)
RECOMPUTING = Workload(lambda: build_looped(recomputes=True), narrow_rows, step=looped)
# The mean of the rows is not zero.
SHIFTED = Workload(build_looped, lambda step: narrow_rows(step) + 0.5, step=looped)
BY_HAND = _own("by-hand", build_looped, narrow_rows, step=by_hand)
