"""What the reference arm of an own model executes on its first step, as a hash for the hash of the case."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.backends import backend
from pytest_fp8.shipping import unship_in_arm
from pytest_fp8.worker.state.training_state import generators_kept
from pytest_fp8.worker.training.parallel import parallelized
from pytest_fp8.worker.training.preparation import checkpoint_activations
from pytest_fp8.worker.training.restored import hooked
from pytest_fp8.worker.training.setup import TrainingSetup
from pytest_fp8.worker.training.step import muted, run_step
from pytest_fp8.worker.watch.observe import Part

VARY = "other shapes with other data"


def first_step(spec: ArmSpec) -> str:
    """16 hex digits, equal in every process and on every device; empty unless the arm is an own model's reference.

    A fresh process of an arm that has run it before is told the result and does not run it again.

    Call it before the arm builds anything. It runs on a copy of the workload, a model and an optimizer of its own, and
    gives back the random state and the memory, so that the arm's own numbers are what they are without it. State that
    an importable module of the user's keeps is shared with the arm.
    """
    if spec.first_step or spec.workload is None or spec.case != spec.case.reference():
        return spec.first_step
    content = json.dumps(executed(spec))
    gc.collect()
    if spec.device == "cuda":
        torch.cuda.empty_cache()
        # The arm tells its peak, which decides whether the pair's arms must give memory back between turns.
        torch.cuda.reset_peak_memory_stats()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def executed(spec: ArmSpec) -> dict[str, Any]:
    """The plain BF16 model as it is built, a batch, and the calls of modules with weights in one eager step.

    ``modules``: name and class; ``parameters``: name, shape, dtype, whether it is trained; ``buffers``: name, shape,
    dtype; ``batch``: shapes and dtypes; ``calls``: see :func:`_calls`. Classes count by ``__qualname__`` alone, since
    libraries move their modules between releases.

    The step runs on two batches. Where the calls differ, as where a router chooses the rows of an expert, they follow
    from numbers that no two devices round alike, and do not count.
    """
    case, own = spec.case, unship_in_arm(spec.workload or "")
    if spec.device == "cuda":
        torch.cuda.init()  # so that its generators are kept
    # Only now: an import that the workload needs may itself seed a generator.
    with generators_kept(), torch.compiler.set_stance("force_eager"):
        setup = TrainingSetup(case, own, backend(case.backend), torch.device(spec.device))
        model = setup.fresh_model(seed=0)
        if case.activation_checkpointing:
            checkpoint_activations(model, None, {})
        told: dict[str, Any] = {
            "modules": [[name, _class(module)] for name, module in model.named_modules()],
            "parameters": [[name, *_kind(p), p.requires_grad] for name, p in model.named_parameters()],
            "buffers": [[name, *_kind(buffer)] for name, buffer in model.named_buffers()],
            "batch": _shapes(setup.timing_batch(0)),
        }
        if case.parallel != "zero3":
            model = parallelized(model, setup, None).wrapped
        run = _step(setup, model)
        calls, others = (_calls(model, run, setup.timing_batch(index)) for index in range(2))
        return {**told, "calls": calls if calls == others else VARY}


def _step(setup: TrainingSetup, model: torch.nn.Module) -> Callable[[Any, Part], None]:
    """One forward pass up to the loss, or one whole hand-written step that moves no weight.

    Its activations are kept as in training, for a loss may take gradients inside. They fit where training fits: there
    is no optimizer state yet.
    """
    step = setup.own.step if setup.own is not None else None
    if step is None:
        loss_of = setup.loss()

        def forward(batch: Any, part: Part) -> None:
            with part.inside("forward"):
                loss_of(model, batch)

        return forward
    optimizer = setup.optimizer(model)

    def whole(batch: Any, part: Part) -> None:
        with muted(optimizer):
            run_step(step, model, batch, optimizer, nullcontext, part.inside)

    return whole


def _calls(model: torch.nn.Module, run: Callable[[Any, Part], None], batch: Any) -> list[Any]:
    """The calls in forward passes that train, in order: name, train or eval, shape and dtype of each tensor given.

    Of modules that hold a parameter with two or more dimensions: Linear, convolution, embedding, stacked experts. Hooks
    on these are the same in every torch and on every device, where the operators of a product are not. What attention
    multiplies follows from its projections' shapes.
    """
    part = Part()
    calls: list[Any] = []

    def hook(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Not in the backward pass: how far torch recomputes there depends on its version.
            if part.name == "forward":
                given = [_kind(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
                calls.append([name, module.training, given])

        return before

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    ]
    with hooked(handles):
        run(batch, part)
    return calls


def _shapes(batch: Any) -> Any:
    """A batch without its numbers: of tensors shape and dtype, of all else the class."""
    if isinstance(batch, torch.Tensor):
        return _kind(batch)
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return _class(batch)


def _kind(tensor: torch.Tensor) -> list[Any]:
    """Shape and dtype. A ragged size is a symbol that is numbered anew in each process."""
    return [[size if isinstance(size, int) else "ragged" for size in tensor.shape], str(tensor.dtype)]


def _class(value: Any) -> str:
    """The class's name, without the function in which it was defined."""
    return type(value).__qualname__.rpartition("<locals>.")[2]
