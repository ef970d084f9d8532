"""What a sound workload of the catalogue states, and the data that several of them learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

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


def sound(**options: Any) -> Callable[[Callable[[], Workload]], Callable[[], Workload]]:
    """Enter a workload into the catalogue, under its function's name; the docstring says what is special."""

    def enter(make: Callable[[], Workload]) -> Callable[[], Workload]:
        CATALOGUE.append(Sound(make.__name__, (make.__doc__ or "").strip(), make, options))
        return make

    return enter


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``labels`` [rows, length]: text, a byte a token; torch's seed chooses it."""
    return text_batch(rows, length, torch.initial_seed() % 2**31, 0)


def vectors(rows: int, width: int = 64) -> torch.Tensor:
    """Rows of numbers; most models here learn a smooth function of them."""
    return torch.randn(rows, width)


def classes_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """A class for each row that a model can learn: the largest of its first columns."""
    return x.flatten(1)[:, :count].argmax(1)


def pictures(count: int = 16, size: int = 16) -> dict[str, torch.Tensor]:
    """Pictures with a bright stripe, and which of ten stripes it is."""
    labels = torch.randint(10, (count,))
    pixels = 0.3 * torch.randn(count, 3, size, size)
    pixels[torch.arange(count), :, labels % size] += 2.0
    return {"pixels": pixels, "labels": labels}
