"""Checks that every converted layer gets a number of rows that FP8 kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.worker.watch.observe import input_of

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine
    from pytest_fp8.worker.training.given import Drawn


CHECKED = 3
"""Timing batches that are looked at before training: those that the warm-up trains on."""


class TokenCountError(ValueError):
    """A converted layer was given a number of rows that no FP8 kernel takes."""

    fp8_cause = "the weight gradient's inner size is the number of tokens, and FP8 kernels take multiples of 16"
    fp8_next = (
        "pad the batch with pytest_fp8.pad_to_multiple(batch), or choose batch x sequence length as a multiple of 16; "
        "for rows that a router chose: pytest_fp8.pad_to_multiple(rows) before the layer, [: len(rows)] after it"
    )


class LaterBatchError(TokenCountError):
    """The first batch had a number of rows that FP8 kernels take, and a later one of another shape has not."""

    fp8_cause = (
        "the first batch was taken and this one is not: a loader's last batch is shorter, or sequences differ in "
        "length; the weight gradient's inner size is the number of rows, and FP8 kernels take multiples of 16"
    )
    fp8_next = (
        "DataLoader(..., drop_last=True) leaves a short batch out; or pad it: pytest_fp8.pad_to_multiple(batch) pads a "
        "dict of sequences, and the rows of a single tensor"
    )


def require_aligned_rows(engine: Engine) -> None:
    """Run forward passes, or hand-written steps that change no weight, on the batches of the warm-up, and raise
    :class:`TokenCountError`.

    With emulated FP8 the layers are then watched during training as well: a CPU multiplies sizes that no FP8 kernel
    takes, a router sends other rows to them in each step, and a later batch may be shorter.
    """
    if _takes_any(engine):
        return
    with _watched(engine, before_training=True) as first:
        for index in range(CHECKED):
            _run_forward(engine, engine.timing_batch(index))
            first.append(engine.setup.drawn)
    if engine.case.emulated:
        _watch(engine, first, before_training=False)


def explain_rows(engine: Engine) -> None:
    """After a step failed: raise :class:`LaterBatchError` where the batch that was drawn last has rows that FP8 kernels
    do not take. The libraries' own errors speak of the sizes of matrices."""
    drawn = engine.setup.drawn
    if _takes_any(engine) or engine.own_step is not None or not drawn.shapes:
        return
    engine.training_batch(seed=0, step=0)
    first = engine.setup.drawn
    if first.shapes == drawn.shapes:
        return
    try:
        with _watched(engine, before_training=True) as before:
            before.append(first)
            _run_forward(engine, engine.training_batch(drawn.seed, drawn.step))
    except TokenCountError:
        raise
    except Exception:
        return  # the step's own error is the one to show


def _takes_any(engine: Engine) -> bool:
    return engine.backend.token_multiple == 1 or not engine.conversion.converted


@contextmanager
def _watched(engine: Engine, before_training: bool) -> Iterator[list[Drawn]]:
    """Look at the rows of every converted layer inside. The list is for the batches that were taken."""
    first: list[Drawn] = []
    with hooked(_watch(engine, first, before_training)):
        yield first


def _watch(engine: Engine, first: list[Drawn], before_training: bool) -> list[Any]:
    modules = dict(engine.model.named_modules())
    names = {id(modules[name]): name for name in engine.conversion.converted}
    looks_at_all = before_training and engine.setup.own is None

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An evaluation has no weight gradient; the forward pass before training runs without gradients.
        if not (looks_at_all or torch.is_grad_enabled()):
            return
        try:
            given = input_of(args, kwargs)
        except StopIteration:
            return  # no tensor: the layer's own error says so
        rows = given.numel() // max(1, given.shape[-1])
        if rows % engine.backend.token_multiple == 0:
            return
        # Of batches with equal shapes the rows are a router's choice.
        drawn = engine.setup.drawn
        later = bool(first) and all(drawn.shapes != other.shapes for other in first)
        whence = f" from {drawn}" if later else ""
        raise (LaterBatchError if later else TokenCountError)(
            f"layer {names[id(module)]!r} was given {rows} rows of input (shape {tuple(given.shape)}){whence}; "
            f"FP8 needs a multiple of {ALIGNMENT}"
        )

    return [modules[name].register_forward_pre_hook(look, with_kwargs=True) for name in names.values()]


def _run_forward(engine: Engine, batch: Any) -> None:
    try:
        with torch.compiler.set_stance("force_eager"):
            if engine.own_step is not None:
                with engine.standing_still():
                    engine.own_step(engine.wrapped, batch, engine.optimizer, engine.precision)
            else:
                # A user's loss may need gradients on its way; ours would keep activations for nothing.
                with torch.set_grad_enabled(engine.setup.own is not None), engine.standing_still(), engine.precision():
                    engine.loss_of(engine.model, batch)
    except Exception as error:
        engine.backend.raise_explained(error)
        raise
