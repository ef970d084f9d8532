"""An arm's model outside of training: its output on a held-out batch, in its own loss or step; an evaluation."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.ranks import forget_aborted
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import inputs_noted, output_of

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

STEP = 1_000_000
"""The batch's number: no curve is that long."""


def held_out_output(engine: Engine, seed: int) -> tuple[torch.Tensor, int]:
    """Of one forward pass as in training; and a fingerprint of the model's input, which a step may draw by itself."""
    # Uncompiled: to compile a forward pass for one batch would take longer than all else here.
    with unchanged(engine), torch.compiler.set_stance("force_eager"):
        engine.besides_weights.restart_counters()
        # Dropout masks are the same in every arm, whatever generator draws them.
        seed_generators(seed)
        # Each rank computes the whole, as an arm on one GPU does.
        batch = engine.training_batch(seed, STEP, whole=True)
        with inputs_noted(engine.model) as inputs:
            output = output_on(engine, batch)
        return output, inputs[0] if inputs else 0


def compared(output: torch.Tensor) -> torch.Tensor:
    """The part of an output that is compared: float32, at most 64 rows of 4096 values."""
    rows = output.float().reshape(-1, output.shape[-1] if output.dim() else 1)
    return rows[:64, :4096].contiguous()


def output_on(engine: Engine, batch: Any) -> torch.Tensor:
    """The model's output on a batch, in a pass as in training. Call it inside ``unchanged(engine)``."""
    if engine.own_step is not None:
        return output_of(engine.wrapped, partial(engine.step, batch))
    with engine.precision():
        if engine.setup.own is None:
            with torch.no_grad():
                logits: torch.Tensor = engine.model(input_ids=batch["input_ids"]).logits
            return logits
        # With gradients, as in training: a loss may take some of its own, and evaluation does not count.
        return output_of(engine.model, lambda: engine.loss_of(engine.called, batch))


def not_evaluated(engine: Engine, batch: int, besides: Container[torch.nn.Module]) -> str | None:
    """Evaluate on the inputs of a step of the warm-up, its ``batch``: in eval mode, without gradients. Changes nothing
    but buffers of the modules ``besides``.

    ``None`` where that was done; else why not: the error's text, or an empty one where no step calls the whole model,
    or there is no room. A model that takes gradients in its own forward pass cannot be evaluated. Of several ranks one
    may be out of memory alone, and the others in a collective: that is raised.
    """
    if not engine.inputs:
        return ""
    args, kwargs = engine.inputs[batch % len(engine.inputs)]
    try:
        with (
            unchanged(engine, besides),
            torch.no_grad(),
            engine.precision(),
            torch.compiler.set_stance("force_eager"),
        ):
            engine.model.eval()
            try:
                engine.model(*args, **kwargs)
            finally:
                engine.settle()
                # Not by the modes alone: a layer may note in train() that training goes on.
                engine.model.train()
    except torch.OutOfMemoryError:
        if engine.case.gpus > 1:
            raise
        return ""
    except Exception as error:
        if not forget_aborted(engine.model):
            raise
        return f"{type(error).__name__}: {error}"
    return None
