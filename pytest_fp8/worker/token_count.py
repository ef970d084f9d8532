"""Checks that every converted layer gets a number of rows that FP8 kernels take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.worker.observe import input_of
from pytest_fp8.worker.step import muted

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine


class TokenCountError(ValueError):
    """A converted layer was given a number of rows that no FP8 kernel takes."""

    fp8_cause = "the weight gradient's inner size is the number of tokens, and FP8 kernels take multiples of 16"
    fp8_next = (
        "pad the batch with pytest_fp8.pad_to_multiple(batch), or choose batch x sequence length as a multiple of 16; "
        "for rows that a router chose: pytest_fp8.pad_to_multiple(rows) before the layer, [: len(rows)] after it"
    )


def require_aligned_rows(engine: Engine) -> None:
    """Run one forward pass, or one hand-written step that changes no weight, and raise :class:`TokenCountError`.

    With emulated FP8 the layers are then watched during training as well: a CPU multiplies sizes that no FP8 kernel
    takes, and a router sends other rows to them in each step.
    """
    multiple = engine.backend.token_multiple
    if multiple == 1 or not engine.conversion.converted:
        return
    modules = dict(engine.model.named_modules())
    names = {id(modules[name]): name for name in engine.conversion.converted}

    def look(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = input_of(args, kwargs)
        rows = given.numel() // max(1, given.shape[-1])
        if rows % multiple:
            raise TokenCountError(
                f"layer {names[id(module)]!r} was given {rows} rows of input (shape {tuple(given.shape)}); "
                f"FP8 needs a multiple of {ALIGNMENT}"
            )

    def look_in_training(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # An evaluation has no weight gradient.
        if torch.is_grad_enabled():
            look(module, args, kwargs)

    def watch(hook: Callable[..., None]) -> list[Any]:
        return [modules[name].register_forward_pre_hook(hook, with_kwargs=True) for name in names.values()]

    handles = watch(look if engine.own_step is None else look_in_training)
    try:
        _run_forward(engine)
    finally:
        for handle in handles:
            handle.remove()
    if engine.case.emulated:
        watch(look_in_training)


def _run_forward(engine: Engine) -> None:
    with torch.compiler.set_stance("force_eager"):
        batch = engine.timing_batch(0)
        if engine.own_step is not None:
            with muted(engine.optimizer):
                engine.own_step(engine.model, batch, engine.optimizer, engine.precision)
        else:
            with torch.no_grad(), engine.precision():
                engine.loss_of(engine.model, batch)
