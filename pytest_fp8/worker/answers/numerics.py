"""What the numerics question asks of an arm: products of the recorded step and of a later one, gradients; and how far
noise of FP8's size moves gradients and outputs. How far it moves losses a curve shows (``worker/curve.py``)."""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.worker.answers.recorded import (
    RANDOM,
    SEED,
    fit_scales,
    fit_scales_to_recorded,
    is_cut,
    observed_step,
    recorded,
)
from pytest_fp8.worker.record.gradients import GradientSketches
from pytest_fp8.worker.record.probe import ProductChecks
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.state.weights import SEEDS_APART, moved_operands, moved_weights
from pytest_fp8.worker.training.ranks import forget_aborted
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import inputs_noted, output_of

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def numerics(engine: Engine, moved: bool, seed: int = SEED) -> dict[str, Any]:
    """The fields of :class:`pytest_fp8.questions.numerics.evidence.ArmNumerics`, as plain data. All of it from the
    weights and the first batches of ``seed``. ``moved``: whether the gradients at moved weights are wanted, too.

    The recorded step gives products and, where it is the step as the arm runs it, gradients.
    """
    first = recorded(engine, seed)
    # Other answers may have trained the arm since its step was recorded.
    engine.restart(seed)
    evaluated, error = evaluated_products(engine, 0)
    return {
        "products": first.products,
        "evaluated": evaluated,
        "evaluation_error": error,
        "gradients": first.gradients or gradients(engine, seed),
        "moved": gradients(engine, seed, draw=0) if moved else None,
        "handed_on": first.handed_on,
        **products_after_steps(engine, LATER, seed),
    }


def evaluated_products(engine: Engine, batch: int) -> tuple[list[dict[str, Any]], str]:
    """The products of an evaluation of a ``batch`` of the warm-up with the arm's weights: forward products alone.
    Weights are no views here, so that a layer finds the copy of one that it keeps beside it. Without any where the
    model cannot be evaluated; then also the error's text, if there was one."""
    checks = ProductChecks(engine)
    if engine.backend.brings_model or not checks.layers:
        return [], ""
    with checks.watching():
        error = not_evaluated(engine, batch, besides=())
    engine.park()
    return (checks.checks(), "") if error is None else ([], error)


def products_after_steps(engine: Engine, steps: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Train so many steps as the arm runs them, from the weights of ``seed`` that it has, and look at the next one.
    ``later`` and ``handed_on_later``: of that step; ``evaluated_later``: of an evaluation.

    A layer's products are compared with its own tensors, so any weights will do. What is kept from step to step and
    not renewed (a transposed weight, an input, a scale) is right in the first step.
    """
    engine.renew_scales()
    seed_generators(seed)
    for step in range(steps):
        engine.step(engine.training_batch(seed, step))
    if is_cut(engine):
        fit_scales_to_recorded(engine, seed, steps)
    checks = ProductChecks(engine)
    observed_step(engine, checks, seed=seed, step=steps)
    evaluated, _ = evaluated_products(engine, 1)
    return {"later": checks.checks(), "handed_on_later": checks.handed_on(), "evaluated_later": evaluated}


# -- the yardstick -----------------------------------------------------------------------------------------------------


def gradients(engine: Engine, seed: int, draw: int | None = None) -> dict[str, Any]:
    """One step as the arm runs it, from the weights that it has; as plain data, the fields of
    :class:`pytest_fp8.questions.numerics.evidence.Gradients`. ``draw``: in which of many ways the weights of all
    Linears are moved meanwhile; ``None``: they are not.

    A step that draws random numbers is run again uncompiled: dropout's masks agree between the arms only there.
    """
    with moved_weights(engine, seed + SEEDS_APART * draw) if draw is not None else nullcontext():
        sketches, found = _gradients(engine, seed)
        if sketches.drew and engine.compiled:
            with torch.compiler.set_stance("force_eager"):
                return _gradients(engine, seed)[1]
        return found


def _gradients(engine: Engine, seed: int) -> tuple[GradientSketches, dict[str, Any]]:
    # Each time from the same buffers: a codebook that moves in each forward pass would else look like a model that any
    # small change moves.
    with unchanged(engine):
        engine.renew_scales()
        fit_scales(engine, lambda: engine.training_batch(seed, step=0))
        batch = engine.training_batch(seed, step=0)
        seed_generators(RANDOM + seed)
        sketches = GradientSketches(engine)
        with unchanged(engine), sketches.watching():
            loss = engine.step(batch, sketches.in_phase)
        engine.park()
        return sketches, sketches.noted(batch, loss)


def moved(engine: Engine, of: str, draws: int, operands: int = 0, seed: int = SEED) -> list[Any]:
    """For so many ways (``draws``) of moving the weights of all Linears, what follows: a router sends some rows to
    other experts, a deep model amplifies.

    ``of="gradients"``: :func:`gradients` from the weights of ``seed``, numbered from 1. Then for ``operands`` ways of
    moving what Linears are given instead, each value on its own. These run uncompiled, which takes more memory: where
    that is not there they are left out, as a gradient that is wrong beside moved weights is no error of memory.
    ``of="outputs"``: how far the output on a held-out batch is from that of the weights that the arm has, as relative
    L2 distances.
    """
    if of == "outputs":
        own, found = held_out_output(engine, seed)[0], list[Any]()
        for draw in range(draws):
            with moved_weights(engine, SEEDS_APART * draw):
                found.append(float((held_out_output(engine, seed)[0] - own).norm()) / (float(own.norm()) or 1.0))
        return found
    engine.restart(seed)
    found = [gradients(engine, seed, draw) for draw in range(1, draws + 1)]
    # Of several ranks one may be alone in this, and the others in a collective.
    short = [torch.OutOfMemoryError] if engine.case.gpus == 1 else []
    with suppress(*short):
        for draw in range(operands):
            with moved_operands(engine, seed + SEEDS_APART * draw):
                found.append(gradients(engine, seed))
    return found


# -- the model outside of training -------------------------------------------------------------------------------------

HELD_OUT = 1_000_000
"""A batch's number: no curve is that long."""


def held_out_output(engine: Engine, seed: int) -> tuple[torch.Tensor, int]:
    """Of one forward pass as in training, on a held-out batch: float32, at most 64 rows of 4096 values. And a
    fingerprint of the model's input, which a step may draw by itself."""
    # Uncompiled: to compile a forward pass for one batch would take longer than all else here.
    with unchanged(engine), torch.compiler.set_stance("force_eager"):
        engine.besides_weights.restart_counters()
        # Dropout masks are the same in every arm, whatever generator draws them.
        seed_generators(seed)
        # Each rank computes the whole, as an arm on one GPU does.
        batch = engine.training_batch(seed, HELD_OUT, whole=True)
        with inputs_noted(engine.model) as inputs:
            output = output_on(engine, batch).float()
    rows = output.reshape(-1, output.shape[-1] if output.dim() else 1)
    return rows[:64, :4096].contiguous(), inputs[0] if inputs else 0


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
