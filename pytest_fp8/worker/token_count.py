"""Names the layer that was given a number of rows that FP8 kernels do not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.record.probe import Call, Probe
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.restored import followed, hooked
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


CHECKED = 3
"""Timing batches that the warm-up trains on."""


class TokenCountError(WorkloadError):
    """A converted layer was given a number of rows that no FP8 kernel takes."""


def require_aligned_rows(engine: Engine, failed: Exception | None) -> None:
    """Raise :class:`TokenCountError` where rows are the reason why a step of the warm-up failed. ``None``: none has run
    yet. With emulated FP8 the rows of each call are then watched from now on, since a CPU multiplies sizes that no FP8
    kernel takes."""
    for index in range(CHECKED if failed is not None else 1):
        _look_again(engine, partial(engine.timing_batch, index), first=failed is None)
    if failed is None:
        RowWatch(engine).handles()


def explain_rows(engine: Engine) -> None:
    """After a step failed: raise :class:`TokenCountError` where a layer was given rows in the batch that was drawn last
    that FP8 kernels do not take. The libraries' own errors speak of the sizes of matrices."""
    drawn = engine.setup.drawn
    if drawn.shapes:
        _look_again(engine, lambda: engine.training_batch(drawn.seed, drawn.step))


class RowWatch(Probe):
    """Raises where the gradient comes of what a converted layer made of a number of rows that no FP8 kernel takes.

    The weight gradient's inner size is the number of rows. A call that no backward pass reaches has no weight gradient,
    and its forward product takes any number of rows: an evaluation, the pooler of an encoder whose user wants the
    sequence.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__({n: engine.model.get_submodule(n) for n in engine.conversion.converted}, engine.device)
        self._engine = engine
        self._odd: dict[tuple[str, int], TokenCountError] = {}
        """The latest call of each layer with such rows."""
        self.refused: TokenCountError | None = None
        """Of a call that raised: the libraries refuse some rows in the forward pass."""

    def called(self, call: Call, output: Any) -> None:
        rows = 0 if call.x is None else call.x.numel() // max(1, call.x.shape[-1])
        if call.x is None or not rows % self._engine.backend.row_multiple(call.layer):
            return
        drawn = self._engine.setup.drawn
        whence = f" from {drawn}" if drawn.shapes else ""
        error = TokenCountError("rows", layer=call.name, rows=rows, shape=tuple(call.x.shape), whence=whence)
        if output is None:
            self.refused = error
        self._odd[call.name, rows] = error

        def came(gradient: torch.Tensor) -> None:
            # The backward pass comes to the last layer first; the first one with as many rows is the one to name.
            raise next(each for (_, odd), each in self._odd.items() if odd == rows)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(came)


def _look_again(engine: Engine, draw: Callable[[], Any], first: bool = False) -> None:
    """Run the step again, uncompiled and without its effect, and raise what rows explain of its failure. ``first``: no
    step has run yet. Its own error is raised then: where FSDP2 has failed once, later steps train apart in silence."""
    watch = RowWatch(engine)
    handles = [*followed(watch.layers.values()), *watch.handles()]
    try:
        with hooked(handles), torch.compiler.set_stance("force_eager"), unchanged(engine):
            engine.step(draw())
    except Exception as error:
        if isinstance(error, TokenCountError):
            raise
        # Else the step's own error is the one to show.
        if watch.refused is not None:
            raise watch.refused from error
        if first:
            raise
