"""Runs one training step for observers to watch: uncompiled, from known weights, without effect on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pytest_fp8.worker.record.accuracy import kept_numbers
from pytest_fp8.worker.record.room import recorded_batch, uncompiled
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.setup import seed_generators

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

SEED = 0
"""Of the weights and the batch of the step: the same in every arm."""
RANDOM = 1_907_201_853
"""Added for the generators: a seed that nobody uses, so that a model that seeds them anew in each step (0, 42) leaves
them elsewhere than one that does not."""

OWN_PASSES = 2
"""Until scales fit that a fresh layer takes from the pass before: those of gradients depend on the forward pass's."""


class Observer(Protocol):
    """Watches the step. Both contexts may change hooks and dispatch modes, and must leave none behind."""

    def watching(self) -> AbstractContextManager[Any]:
        """Opened once, around the whole step."""

    def in_phase(self, name: str) -> AbstractContextManager[Any]:
        """Opened around each part of the step: ``forward``, ``backward``, ``optimizer``, ``evaluation``. Micro-batches
        alternate, so that a part comes several times."""
        return nullcontext()


def instrumented_step(
    engine: Engine, *observers: Observer, seed: int = SEED, step: int = 0, restart: bool = True
) -> torch.Tensor:
    """One step in which both arms do the same work; gives its loss, detached.

    The arm restarts with the weights of ``seed``, gets the first batch of that seed's curve, of the suite's models the
    beginning of it, and draws from generators that are seeded alike, so that dropout masks are the same in both arms.
    Compiled code runs uncompiled. The optimizer changes no weight, and gradients are dropped afterwards.

    Without ``restart`` the arm goes on from where it is, with the batch of ``step``: its scales are those that its own
    training has left.
    """
    if restart:
        engine.restart(seed)
        fit_scales_to_recorded(engine, seed, step)
    batch = recorded_batch(engine, seed, step)
    seed_generators(RANDOM + seed)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer.in_phase(name))
            yield

    with ExitStack() as stack:
        stack.enter_context(unchanged(engine))
        stack.enter_context(uncompiled(engine))
        for observer in observers:
            stack.enter_context(observer.watching())
        loss = engine.step(batch, phase=phase)
    engine.park()
    return loss


def fit_scales_to_recorded(engine: Engine, seed: int, step: int = 0) -> None:
    """:func:`fit_scales` to the batch of the instrumented step. Of fewer tokens the mean loss has larger gradients."""
    with uncompiled(engine):
        fit_scales(engine, lambda: recorded_batch(engine, seed, step))


def fit_scales(engine: Engine, draw: Callable[[], Any]) -> None:
    """Let delayed scaling see the batch that is about to be measured, which ``draw`` gives: its scales are those of
    past steps.

    A fresh model's first scales fit badly, which says nothing of the layer. Seen on an H200: after the two calibration
    passes of a restart, on another batch, a gradient of a 1B model is 31 dB worse than the recipe's own casts make it.
    The same holds for layers of the user's own that keep numbers to scale by.
    """
    is_fp8 = engine.backend.is_fp8_layer
    own = any(is_fp8(module) and kept_numbers(module) for module in engine.model.modules())
    engine.calibrate(engine.calibration_passes or OWN_PASSES * own, lambda _: draw())
