"""An arm's model on a held-out batch, where its own loss or step calls it: its output, its inputs, an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state.own_state import own_state_kept
from pytest_fp8.worker.state.training_state import buffers_kept, generators_kept
from pytest_fp8.worker.training.model_output import first_inputs, inputs_noted, output_of
from pytest_fp8.worker.training.parallel import called
from pytest_fp8.worker.training.ranks import forget_aborted, reshard
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import first_output, forward_alone

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

STEP = 1_000_000
"""The batch's number: no curve is that long."""


def held_out_output(engine: Engine, seed: int) -> tuple[torch.Tensor, int]:
    """Of one forward pass as in training, without effect on weights and buffers; and a fingerprint of the model's
    input, which a step may draw by itself."""
    # Uncompiled: to compile a forward pass for one batch would take longer than all else here.
    stance = torch.compiler.set_stance("force_eager")
    with generators_kept(), buffers_kept(engine.model), stance:
        # Dropout masks are the same in every arm, whatever generator draws them.
        seed_generators(seed)
        # Each rank computes the whole, as an arm on one GPU does.
        batch = engine.training_batch(seed, STEP, whole=True)
        with inputs_noted(engine.model) as inputs:
            output = output_on(engine, batch)
        reshard(engine.model)
        return output, inputs[0] if inputs else 0


def compared(output: torch.Tensor) -> torch.Tensor:
    """The part of an output that is compared: float32, at most 64 rows of 4096 values."""
    rows = output.float().reshape(-1, output.shape[-1] if output.dim() else 1)
    return rows[:64, :4096].contiguous()


def output_on(engine: Engine, batch: Any) -> torch.Tensor:
    """The model's output on a batch, in a forward pass as in training."""
    with engine.precision():
        if engine.setup.own is None:
            with torch.no_grad():
                logits: torch.Tensor = engine.model(input_ids=batch["input_ids"]).logits
            return logits
        # With gradients, as in training: a loss may take some of its own, and evaluation does not count.
        if engine.own_step is not None:
            return first_output(engine.own_step, engine.wrapped, batch, engine.optimizer, engine.precision)
        return output_of(engine.model, lambda: engine.loss_of(called(engine), batch))


def inputs_of(engine: Engine, seed: int, step: int = STEP, whole: bool = True) -> tuple[Any, Any] | None:
    """Arguments of the model on the batch of a step, by default a held-out one; ``None`` where the loss or step calls
    parts of the model alone. ``whole``: of all ranks together."""
    own, own_step, model = engine.setup.own, engine.own_step, engine.wrapped
    with generators_kept(), buffers_kept(model), torch.compiler.set_stance("force_eager"):
        seed_generators(seed)
        batch = engine.training_batch(seed, step, whole=whole)
        if own is None:
            return (), {"input_ids": batch["input_ids"]}
        with engine.precision(), forward_alone(engine.optimizer):
            run = partial(own_step, model, batch, engine.optimizer, engine.precision) if own_step is not None else None
            found = first_inputs(model, run or partial(engine.loss_of, model, batch))
        # A step may evaluate first.
        reshard(engine.model)
        return found


def not_evaluated(
    engine: Engine, inputs: tuple[Any, Any] | None, is_fp8_layer: Callable[[torch.nn.Module], bool]
) -> str | None:
    """Evaluate, and put back what the model keeps besides its weights, but for FP8 layers, as ``is_fp8_layer`` names
    them. ``None`` where that was done; else why not: the error's text, or an empty one without ``inputs``. A model that
    takes gradients in its own forward pass cannot be evaluated. Of several ranks one may be out of memory alone, and
    the others in a collective: that is raised."""
    if inputs is None:
        return ""
    try:
        with own_state_kept(engine.model, is_fp8_layer):
            evaluate(engine, inputs)
    except torch.OutOfMemoryError:
        if engine.case.gpus > 1:
            raise
        return ""
    except Exception as error:
        if not forget_aborted(engine.model):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def evaluate(engine: Engine, inputs: tuple[Any, Any]) -> None:
    """Call the model as an evaluation does: in eval mode, without gradients."""
    args, kwargs = inputs
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with generators_kept(), torch.no_grad(), engine.precision(), torch.compiler.set_stance("force_eager"):
            engine.model(*args, **kwargs)
    finally:
        reshard(engine.model)
        # By train(), too: a layer may note there that training goes on.
        engine.model.train()
        for module, training in modes:
            module.training = training
