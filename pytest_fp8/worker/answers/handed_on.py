"""What an optimizer is given of each layer's weight gradient, beside what the layer's own products gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.restored import replaced

if TYPE_CHECKING:
    from pytest_fp8.worker.answers.product_watch import ProductWatch
    from pytest_fp8.worker.run.engine import Engine


class HandedOnWatch:
    """An observer of :func:`instrumented_step` beside a :class:`ProductWatch`: at each call of ``optimizer.step()`` the
    gradients of the layers' weights, in the lines that are compared of their products. On one GPU; with several,
    gradients are reduced between the two."""

    def __init__(self, engine: Engine, products: ProductWatch) -> None:
        self._engine, self._products = engine, products
        self._sums: dict[str, torch.Tensor | None] = {}
        """Layer -> the sum of its calls' weight gradients since the last step; ``None`` where one was not seen."""
        self._found: list[tuple[str, torch.Tensor]] = []
        products.on_wgrad = self._add

    @contextmanager
    def watching(self) -> Iterator[None]:
        optimizer = innermost(self._engine.optimizer)
        real = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._note()
            return real(*args, **kwargs)

        # torch's schedules look for it and warn without it.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        with replaced(optimizer, "step", step) if self._engine.case.gpus == 1 else nullcontext():
            yield

    def in_phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def noted(self) -> list[dict[str, Any]]:
        """In the order of the steps, with the fields of :class:`pytest_fp8.questions.numerics.evidence.HandedOn`."""
        if not self._found:
            return []
        rows = torch.stack([numbers for _, numbers in self._found]).tolist()
        return [
            {"layer": layer, "cosine": cosine, "factor": factor}
            for (layer, _), (cosine, factor) in zip(self._found, rows, strict=True)
        ]

    def _add(self, layer: str, seen: torch.Tensor | None) -> None:
        before = self._sums.get(layer, 0.0)
        self._sums[layer] = None if seen is None or before is None else before + seen.double()

    def _note(self) -> None:
        sums, self._sums = self._sums, {}
        for layer, made in sums.items():
            gradient = self._products.sample_of(self._products.layers[layer]._parameters["weight"])
            if made is None or gradient is None or gradient.shape != made.shape:
                continue
            product, own, length = (gradient * made).sum(), made.square().sum(), gradient.norm()
            if own and length:
                self._found.append((layer, torch.stack([product / (own.sqrt() * length), product / own])))
