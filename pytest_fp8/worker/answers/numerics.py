"""What the numerics question asks of an arm: products of instrumented steps, gradients, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.worker.answers.gradients import gradients, moved_gradients
from pytest_fp8.worker.answers.handed_on import HandedOnWatch
from pytest_fp8.worker.answers.held_out import inputs_of, not_evaluated
from pytest_fp8.worker.answers.instrumented import SEED, Observer, fit_scales, instrumented_step
from pytest_fp8.worker.answers.outputs import OutputWatch
from pytest_fp8.worker.answers.product_watch import ProductWatch
from pytest_fp8.worker.state.training_state import buffers_kept
from pytest_fp8.worker.training.setup import seed_generators

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def numerics(engine: Engine, moved: bool, seed: int = SEED) -> dict[str, Any]:
    """What the numerics question asks of an arm, as plain data: the fields of
    :class:`pytest_fp8.questions.numerics.evidence.ArmNumerics`. All of it from the weights and the first batches
    of ``seed``. ``moved``: whether the gradients at moved weights are wanted, too."""
    outputs = OutputWatch(engine)
    watch = ProductWatch(engine)
    handed_on = HandedOnWatch(engine, watch)
    found = products(engine, seed, watch, handed_on, outputs)
    evaluated, error = evaluated_products(engine, 0, seed)
    return {
        "products": found,
        "evaluated": evaluated,
        "evaluation_error": error,
        "gradients": gradients(engine, seed),
        "moved": moved_gradients(engine, seed) if moved else None,
        "handed_on": handed_on.noted(),
        **later_products(engine, seed),
        "outputs": outputs.noted(),
    }


def products(engine: Engine, seed: int, watch: ProductWatch, *others: Observer) -> list[dict[str, Any]]:
    """One instrumented step; a record for each product compared, with the fields of
    :class:`pytest_fp8.questions.numerics.evidence.ProductCheck`. ``others`` watch the same step."""
    engine.restart(seed)
    fit_scales(engine, seed)
    # Gradients are compared from equal buffers: a codebook that this step moves would not be the same in both arms.
    with buffers_kept(engine.model):
        instrumented_step(engine, watch, *others, seed=seed, restart=False)
    return watch.checks()


def evaluated_products(engine: Engine, step: int, seed: int = SEED) -> tuple[list[dict[str, Any]], str]:
    """The same of an evaluation of a step's batch with the weights that the arm has: forward products alone. Weights
    are no views here, so that a layer finds the copy of one that it keeps beside it. Without any where the model cannot
    be evaluated; then also the error's text, if there was one."""
    watch = ProductWatch(engine)
    if engine.backend.brings_model or not watch.layers:
        return [], ""
    inputs = inputs_of(engine, seed, step, whole=False)
    with watch.watching():
        error = not_evaluated(engine, inputs, engine.backend.is_fp8_layer)
    engine.park()
    return (watch.checks(), "") if error is None else ([], error)


def later_products(engine: Engine, seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """``later`` and ``handed_on_later``: as :func:`products`, of step :data:`LATER` of a training run, whose steps
    before it ran as the arm runs them; ``evaluated_later``: of an evaluation after them.

    A layer's products are compared with its own tensors, so any weights will do. What is kept from step to step and
    not renewed (a transposed weight, an input, a scale) is right in the first step.
    """
    engine.restart(seed)
    seed_generators(seed)
    for step in range(LATER):
        engine.step(engine.training_batch(seed, step))
    watch = ProductWatch(engine)
    handed_on = HandedOnWatch(engine, watch)
    instrumented_step(engine, watch, handed_on, seed=seed, step=LATER, restart=False)
    evaluated, _ = evaluated_products(engine, LATER, seed)
    return {"later": watch.checks(), "handed_on_later": handed_on.noted(), "evaluated_later": evaluated}
