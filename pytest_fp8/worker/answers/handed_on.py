"""What an optimizer is given of each layer's weight gradient, beside what the layer's own products gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.worker.answers.instrumented import Observer
from pytest_fp8.worker.training.phases import around_step, closure_of
from pytest_fp8.worker.training.restored import replaced

if TYPE_CHECKING:
    from pytest_fp8.worker.answers.product_watch import ProductWatch
    from pytest_fp8.worker.run.engine import Engine


class HandedOnWatch(Observer):
    """Beside a :class:`ProductWatch` of the same step: at each call of ``optimizer.step()`` the
    gradients of the layers' weights, in the lines that are compared of their products. On one GPU; with several,
    gradients are reduced between the two. Not of a step with a closure, which goes backward inside it."""

    def __init__(self, engine: Engine, products: ProductWatch) -> None:
        self._engine, self._products = engine, products
        self._sums: dict[str, torch.Tensor | None] = {}
        """Layer -> the sum of its calls' weight gradients since the last step; ``None`` where one was not seen."""
        self._found: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._engine.case.gpus > 1:
            yield
            return
        with around_step(self._engine.optimizer, self._before_step), replaced(self._products, "on_wgrad", self._add):
            yield
        self._sums.clear()

    def noted(self) -> list[dict[str, Any]]:
        """In the order of the steps, with the fields of :class:`pytest_fp8.questions.numerics.evidence.HandedOn`."""
        if not self._found:
            return []
        rows = torch.stack([numbers for _, numbers in self._found]).tolist()
        return [
            {"layer": layer, "cosine": cosine, "factor": factor, "length": length}
            for (layer, _), (cosine, factor, length) in zip(self._found, rows, strict=True)
        ]

    def _add(self, layer: str, seen: torch.Tensor | None) -> None:
        before = self._sums.get(layer, 0.0)
        self._sums[layer] = None if seen is None or before is None else before + seen.double()

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is None:
            with torch.no_grad(), _disable_current_modes():
                self._note()
        self._sums.clear()

    def _note(self) -> None:
        for layer, made in self._sums.items():
            weight = self._products.layers[layer]._parameters["weight"]
            if made is None or weight is None or type(weight.grad) is not torch.Tensor:
                continue
            gradient = self._products.sample_of(weight.grad).double()
            product, own, length = (gradient * made).sum(), made.square().sum(), gradient.norm()
            if own and length:
                numbers = [product / (own.sqrt() * length), product / own, own.sqrt()]
                self._found.append((layer, torch.stack(numbers)))
