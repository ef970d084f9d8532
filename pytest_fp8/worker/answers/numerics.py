"""What the numerics question asks of an arm: products of the recorded step and of a later one, gradients, outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_fp8.questions.numerics.evidence import LATER
from pytest_fp8.worker.answers.recorded import SEED, fit_scales_to_recorded, is_cut, observed_step, recorded
from pytest_fp8.worker.answers.yardstick import gradients
from pytest_fp8.worker.record.held_out import not_evaluated
from pytest_fp8.worker.record.probe import ProductChecks
from pytest_fp8.worker.training.setup import seed_generators

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
