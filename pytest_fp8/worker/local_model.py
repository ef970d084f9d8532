"""A case's model in the caller's own process, for tests that touch its modules."""

from __future__ import annotations

import torch

from pytest_fp8.backends import backend
from pytest_fp8.backends.linears import mark_skipped
from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.worker.training.setup import TrainingSetup, converted
from pytest_fp8.workload import Workload


def local_model(case: Case, workload: Workload | None, convert: bool) -> torch.nn.Module:
    """The model with the weights of seed 0, uncompiled; with ``convert`` in the case's recipe.

    Raises :class:`Fp8Error` where the backend changes its whole process, or cannot run here.
    """
    chosen = backend(case.backend)
    if chosen.brings_model or (convert and chosen.through_accelerate):
        raise Fp8Error(
            R.CANNOT_RUN_HERE,
            f"{case.backend} changes the whole process it is used in, so its models live in arms only",
            next_step="use fp8_pair, or fp8_pair.fp8.call(function)",
        )
    usable, reason = chosen.usable(case.recipe, case.emulated)
    if convert and not usable:
        raise Fp8Error(R.CANNOT_RUN_HERE, f"recipe {case.recipe!r} cannot run here: {reason}")
    device = torch.device("cpu" if case.emulated else "cuda")
    setup = TrainingSetup(case, workload, chosen, device)
    model = setup.fresh_model(seed=0)
    if not convert:
        return model
    mark_skipped(model, workload.leave if workload is not None else ())
    if workload is not None and workload.convert is not None:
        return converted(workload.convert, model)
    return chosen.prepare(model, setup.optimizer, case).model
