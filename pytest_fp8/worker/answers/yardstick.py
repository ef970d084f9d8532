"""How far noise of FP8's size moves an arm's gradients and outputs: weights, or what Linears are given, are moved at
random by as much as FP8 moves products. How far it moves losses a curve shows (:mod:`pytest_fp8.worker.curve`)."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.answers.recorded import RANDOM, SEED, fit_scales
from pytest_fp8.worker.record.gradients import GradientSketches
from pytest_fp8.worker.record.held_out import compared, held_out_output
from pytest_fp8.worker.record.perturb import moved_operands, moved_weights
from pytest_fp8.worker.state.seed_weights import SEEDS_APART
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.setup import seed_generators

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


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
            loss = engine.step(batch, sketches.in_phase if engine.case.gpus > 1 else nullcontext)
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
        own, found = _output(engine, seed), list[Any]()
        for draw in range(draws):
            with moved_weights(engine, SEEDS_APART * draw):
                found.append(float((_output(engine, seed) - own).norm()) / (float(own.norm()) or 1.0))
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


def _output(engine: Engine, seed: int) -> torch.Tensor:
    return compared(held_out_output(engine, seed)[0])
