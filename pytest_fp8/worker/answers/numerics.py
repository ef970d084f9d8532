"""What the numerics question asks of an arm: products of instrumented steps, gradients, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.worker.answers.instrumented import SEED, fit_scales_to_recorded, instrumented_step
from pytest_fp8.worker.answers.ledger import recorded
from pytest_fp8.worker.answers.yardstick import gradients, moved_gradients
from pytest_fp8.worker.record.clock import compiled_frames
from pytest_fp8.worker.record.gradients import GradientSketches
from pytest_fp8.worker.record.held_out import not_evaluated
from pytest_fp8.worker.record.probe import ProductChecks
from pytest_fp8.worker.record.room import is_cut
from pytest_fp8.worker.record.tables import outputs_of
from pytest_fp8.worker.training.setup import seed_generators

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def numerics(engine: Engine, moved: bool, seed: int = SEED) -> dict[str, Any]:
    """What the numerics question asks of an arm, as plain data: the fields of
    :class:`pytest_fp8.questions.numerics.evidence.ArmNumerics`. All of it from the weights and the first batches
    of ``seed``. ``moved``: whether the gradients at moved weights are wanted, too.

    One instrumented step gives products and gradients, the recorded step outputs. Where code is compiled, which runs
    uncompiled in that step, and where the step has few of a batch's tokens, gradients are those of a step as the arm
    runs it.
    """
    outputs = outputs_of(recorded(engine).step.table)
    engine.restart(seed)
    fit_scales_to_recorded(engine, seed)
    products, sketches = ProductChecks(engine), GradientSketches(engine)
    loss = instrumented_step(engine, products, sketches, seed=seed, restart=False)
    evaluated, error = evaluated_products(engine, 0)
    as_it_runs = engine.compiled or compiled_frames() or is_cut(engine)
    return {
        "products": products.checks(),
        "evaluated": evaluated,
        "evaluation_error": error,
        "gradients": gradients(engine, seed) if as_it_runs else sketches.noted(engine.training_batch(seed, 0), loss),
        "moved": moved_gradients(engine, seed) if moved else None,
        "handed_on": products.handed_on(),
        **later_products(engine, seed),
        "outputs": outputs,
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


def later_products(engine: Engine, seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """``later`` and ``handed_on_later``: of step :data:`LATER` of a training run, whose steps before it ran as the arm
    runs them; ``evaluated_later``: of an evaluation after them.

    A layer's products are compared with its own tensors, so any weights will do. What is kept from step to step and
    not renewed (a transposed weight, an input, a scale) is right in the first step.
    """
    engine.restart(seed)
    seed_generators(seed)
    for step in range(LATER):
        engine.step(engine.training_batch(seed, step))
    if is_cut(engine):
        fit_scales_to_recorded(engine, seed, LATER)
    checks = ProductChecks(engine)
    instrumented_step(engine, checks, seed=seed, step=LATER, restart=False)
    evaluated, _ = evaluated_products(engine, 1)
    return {"later": checks.checks(), "handed_on_later": checks.handed_on(), "evaluated_later": evaluated}
