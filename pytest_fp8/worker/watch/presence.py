"""Counts the matrix products of one step of a curve, in FP8 and in other precisions, while it trains as ever.

On a GPU the step is profiled, about a second at 1B. On a CPU a dispatch mode counts, under which code that the user
compiled runs uncompiled in this one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pytest_fp8.questions.layers.products import FP8, Product
from pytest_fp8.questions.loss.evidence import ProductCount
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.watch.ledger_operators import OperatorWatch
from pytest_fp8.worker.watch.profile import profile_step

PHASES = ("forward", "backward", RECOMPUTE)
"""Evaluations inside a step are left out: they need not come in each step."""


def counted_step(
    engine: Any, batch: Any, on_gradients: Callable[[], None]
) -> tuple[torch.Tensor, dict[str, ProductCount]]:
    """One training step: its loss, and its products by phase."""
    losses: list[torch.Tensor] = []

    def step(phase: Callable[[str], Any]) -> None:
        losses.append(engine.step(batch, phase, on_gradients))

    if engine.device.type == "cuda":
        products = profile_step(step)["products"]
    else:
        watch = OperatorWatch(engine.model)
        with watch.watching():
            step(watch.in_phase)
        products = [owned.product for owned in watch.products]
    return losses[0], count(products)


def count(products: Iterable[Product]) -> dict[str, ProductCount]:
    """Products by phase."""
    found = {phase: [p for p in products if p.phase == phase] for phase in PHASES}
    return {
        phase: ProductCount(fp8=sum(p.kind == FP8 for p in ran), other=sum(p.kind != FP8 for p in ran))
        for phase, ran in found.items()
        if ran
    }
