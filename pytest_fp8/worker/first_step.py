"""What the reference arm of an own model executes on its first step, as a hash for the hash of the case."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from pytest_fp8.worker.record.recorder import StepRecorder, StepTable
from pytest_fp8.worker.state.snapshot import generators_kept, unchanged
from pytest_fp8.worker.tensors import plain_name

VARY = "other shapes with other data"


def first_step(engine: Any) -> str:
    """16 hex digits, equal in every process and on every device; empty unless the arm is an own model's reference.

    A fresh process of an arm that has run it before is told the result and does not run it again. Call it before the
    warm-up: there is no optimizer state yet, so that an uncompiled step fits where training fits.
    """
    told: str = engine.spec.first_step
    if told or engine.setup.own is None or engine.case != engine.case.reference():
        return told
    return hashlib.sha256(json.dumps(executed(engine)).encode()).hexdigest()[:16]


def executed(engine: Any) -> dict[str, Any]:
    """The plain BF16 model as it is built, a batch, and the calls of modules with weights in one uncompiled step.

    ``calls``: see :func:`calls_of`. The step runs on two batches. Where the calls differ, as where a router chooses the
    rows of an expert, they follow from numbers that no two devices round alike, and do not count.
    """
    with generators_kept():
        calls, others = (_calls(engine, engine.timing_batch(index)) for index in range(2))
        batch = _shapes(engine.timing_batch(0))
    engine.park()
    return {**engine.definition, "batch": batch, "calls": calls if calls == others else VARY}


def definition_of(model: torch.nn.Module) -> dict[str, Any]:
    """``modules``: name and class; ``parameters``: name, shape, dtype, whether it is trained; ``buffers``: name, shape,
    dtype. Classes count by ``__qualname__`` alone, since libraries move their modules between releases."""
    return {
        "modules": [[name, _class(module)] for name, module in model.named_modules()],
        "parameters": [[name, *_kind(p), p.requires_grad] for name, p in model.named_parameters()],
        "buffers": [[name, *_kind(buffer)] for name, buffer in model.named_buffers()],
    }


def _calls(engine: Any, batch: Any) -> list[Any]:
    """Of one forward pass up to the loss, or of one whole hand-written step."""
    recorder = StepRecorder(engine.model)
    with torch.compiler.set_stance("force_eager"), unchanged(engine), recorder.watching():
        if engine.own_step is not None:
            engine.step(batch, recorder.in_phase)
        else:
            with recorder.in_phase("forward"), engine.precision():
                engine.loss_of(engine.called, batch)
    return calls_of(recorder.table, engine.model)


def calls_of(table: StepTable, model: torch.nn.Module) -> list[Any]:
    """The calls in the forward part, in order: name, train or eval, shape and dtype of each tensor given.

    Of modules that hold a parameter with two or more dimensions: Linear, convolution, embedding, stacked experts. These
    are the same in every torch and on every device, where the operators of a product are not. What attention multiplies
    follows from its projections' shapes. Not in the backward pass: how far torch recomputes there depends on its
    version.
    """
    names = {
        plain_name(name): name
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    return [
        [names[call.module], call.training, [_told(shape, dtype) for shape, dtype in call.tensors]]
        for call in table.calls
        if call.part == "forward" and call.module in names
    ]


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


def _told(shape: Any, dtype: str) -> list[Any]:
    """The same of a tensor in a table."""
    return [[size if size >= 0 else "ragged" for size in shape], f"torch.{dtype}"]


def _class(value: Any) -> str:
    """The class's name, without the function in which it was defined."""
    return type(value).__qualname__.rpartition("<locals>.")[2]
