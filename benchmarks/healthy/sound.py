"""What a sound workload of the catalogue states, and the data that several of them learn from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from pytest_fp8 import Workload
from pytest_fp8.case import Case
from pytest_fp8.zoo.data import text_batch

STEPS, SEEDS = 10, 2
"""Length and number of the loss curves: enough to see a wrong step, short enough for the whole catalogue."""


@dataclass(frozen=True)
class Sound:
    """A workload in which nothing is wrong. ``what`` says in one line what is special about it."""

    name: str
    what: str
    make: Callable[[], Workload]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the case, as the mark takes them."""
    recipes: Collection[str] = ()
    """Those that its own conversion takes; empty: it has none, and each recipe is asked."""

    def takes(self, recipe: str) -> bool:
        return not self.recipes or recipe in self.recipes

    def case(self, recipe: str) -> Case:
        lengths = {"steps": STEPS, "seeds": SEEDS, **self.options}
        return Case("own", "torchao", recipe, emulated=True, name=self.name, **lengths)

    def workload(self, seed: int) -> Workload:
        """The workload as its user wrote it (seed 0), or with other random weights and data."""
        made = self.make()
        return replace(made, build=Shifted(made.build, seed), batch=Shifted(made.batch, seed)) if seed else made


@dataclass(frozen=True)
class Shifted:
    """A function of a workload that draws other numbers than it would."""

    function: Callable[..., Any]
    seed: int

    def __call__(self, *arguments: Any) -> Any:
        torch.manual_seed(torch.initial_seed() + 100_003 * self.seed)
        return self.function(*arguments)


CATALOGUE: list[Sound] = []
F = TypeVar("F", bound=Callable[..., Any])


def entry(
    name: str, what: str, case: Mapping[str, Any] | None = None, recipes: Collection[str] = (), **functions: Any
) -> None:
    """Enter a workload of these functions: of :class:`Net`, :func:`rows` and :func:`apart` where none is given.

    With ``loss=None`` the model or the step has a loss of its own. ``recipes``: those of its own conversion.
    """
    defaults: dict[str, Any] = {"build": Net, "batch": rows, **({} if "step" in functions else {"loss": apart})}
    made = Workload(**{**defaults, **functions})
    CATALOGUE.append(Sound(name, what, lambda: made, case or {}, recipes))


def of(kind: str, **more: Any) -> Callable[[F], F]:
    """Enter a workload whose ``kind`` (``step``, ``loss``, ``batch``, ``build``, ``optimizer``) is the function, under
    the function's name; the docstring says what is special."""

    def enter(function: F) -> F:
        entry(function.__name__, (function.__doc__ or "").strip(), **{kind: function}, **more)
        return function

    return enter


Parts = Callable[..., Mapping[str, Any]]
"""Gives a model's parts by name: modules, parameters, tensors (which become buffers) and plain attributes."""


def module(parts: Parts = dict, base: type[nn.Module] = nn.Module) -> Callable[[Callable[..., Any]], type[nn.Module]]:
    """A class of modules that has these parts and computes the function; its arguments are those of ``parts``."""

    def make(forward: Callable[..., Any]) -> type[nn.Module]:
        def build(self: nn.Module, *given: Any) -> None:
            base.__init__(self)
            for name, part in parts(*given).items():
                if type(part) is torch.Tensor:
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

        names = {"__module__": forward.__module__, "__doc__": forward.__doc__}
        return type(forward.__name__, (base,), {**names, "__init__": build, "forward": forward})

    return make


def model(parts: Parts = dict, base: type[nn.Module] = nn.Module, **more: Any) -> Callable[[Any], type[nn.Module]]:
    """Enter a workload whose model is :func:`module`'s of the function, under its name; the docstring says what is
    special."""

    def enter(forward: Any) -> type[nn.Module]:
        made = module(parts, base)(forward)
        entry(made.__name__, (made.__doc__ or "").strip(), build=made, **more)
        return made

    return enter


class Net(nn.Module):
    """A residual block, a norm and a head, over rows of 64."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64)
        self.norm, self.dropout = nn.LayerNorm(64), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(x + self.dropout(self.down(gelu(self.up(x))))))


def mlp(inside: int = 64, hidden: int = 128, outside: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, hidden), nn.GELU(), nn.Linear(hidden, outside))


def toward(wanted: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss: how far the model is from a function of its input."""

    def loss(model: Any, x: Any) -> Any:
        return (model(x) - wanted(x)).float().square().mean()

    return loss


apart = toward(torch.sin)


def next_byte(model: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    return cross_entropy(model(batch["input_ids"]).float().flatten(0, 1), batch["labels"].flatten())


def rows(step: int) -> torch.Tensor:
    return vectors(128)


def lines(step: int) -> dict[str, torch.Tensor]:
    return text(8, 16)


def backward(batch_loss: Callable[[Any, Any], Any], model: Any, batch: Any, precision: Any) -> Any:
    """Both passes of one batch; gives its loss."""
    with precision():
        loss = batch_loss(model, batch)
    loss.backward()
    return loss.detach()


def finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def trained(batch_loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step around a loss."""

    def step(model: Any, batch: Any, optimizer: Any, precision: Any) -> Any:
        loss = backward(batch_loss, model, batch, precision)
        finish(optimizer)
        return loss

    return step


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels`` [rows, length]: text, a byte a token; torch's seed chooses it."""
    return text_batch(rows, length, torch.initial_seed() % 2**31, 0)


def vectors(rows: int, width: int = 64) -> torch.Tensor:
    """Rows of numbers; most models here learn a smooth function of them."""
    return torch.randn(rows, width)


def classes_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """A class for each row that a model can learn: the largest of its first columns."""
    return x.flatten(1)[:, :count].argmax(1)


def pictures(count: int) -> dict[str, torch.Tensor]:
    """Pictures of 16 by 16 with a bright stripe, and which of ten stripes it is."""
    labels = torch.randint(10, (count,))
    pixels = 0.3 * torch.randn(count, 3, 16, 16)
    pixels[torch.arange(count), :, labels] += 2.0
    return {"pixels": pixels, "labels": labels}
