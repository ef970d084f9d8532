"""What keeps an uncompiled step small enough: few tokens of the suite's models, a user's activations on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.layers.products import LayerCall, Product
from pytest_fp8.worker.record.samples import unwatched
from pytest_fp8.zoo.batch import with_tensors

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

TOKENS = 1152
"""Most tokens of a recorded batch of the suite's models, on each rank. Which layer multiplies what does not depend on
their number, but memory does: an uncompiled step of 8B keeps 10 MiB a token, and 4096 tokens find no room beside the
weights on 80 GB. A multiple of the 128 values of a scaling block, and no size of a feature, from which roles are read.
"""
OVER_COMPILED = 2.0
"""Memory of an uncompiled step over a compiled one, beside what is resident: docs/findings.md."""


def recorded_batch(engine: Engine, seed: int, step: int) -> Any:
    """The batch of a recorded step, the same in every arm: that of the training step; of a large one of the suite's
    models the first :data:`TOKENS` tokens, as one sequence."""
    batch = engine.training_batch(seed, step)
    return with_tensors(batch, lambda each: each.reshape(1, -1)[:, :TOKENS]) if is_cut(engine) else batch


def is_cut(engine: Engine) -> bool:
    """Whether recorded batches have fewer tokens than those of training."""
    return engine.case.tokens is not None and _trained_tokens(engine) > TOKENS


def _trained_tokens(engine: Engine) -> int:
    """Of the suite's models, on each rank."""
    return prod(engine.case.tokens or ()) // engine.case.gpus


def of_training(engine: Engine, product: Product) -> Product:
    """A recorded product with as many tokens as a training step has."""
    one, two = product.outer
    size = partial(_size_in_training, engine)
    return replace(product, inner=size(product.inner), outer=(size(one), size(two)))


def call_of_training(engine: Engine, call: LayerCall) -> LayerCall:
    """The same of a recorded call."""
    ran = {role: of_training(engine, product) for role, product in call.ran.items()}
    return replace(call, rows=_size_in_training(engine, call.rows), ran=ran)


def _size_in_training(engine: Engine, size: int) -> int:
    return _trained_tokens(engine) if size == TOKENS and is_cut(engine) else size


@contextmanager
def uncompiled(engine: Engine) -> Iterator[None]:
    """Run compiled code uncompiled inside the block: hooks do not run in it. Where a user's step then needs more memory
    than is free, its activations wait in the host's memory."""
    large = engine.setup.own is not None and engine.compiled and engine.device.type == "cuda" and not _fits()
    with torch.compiler.set_stance("force_eager"), saved_on_host() if large else nullcontext():
        yield


def _fits() -> bool:
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return OVER_COMPILED * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) < free


def saved_on_host() -> AbstractContextManager[Any]:
    """torch's own ``save_on_cpu``, invisible to dispatch modes. Tensors of a class of their own, such as a library's
    FP8 tensors, stay where they are."""
    plain = torch.autograd.graph.save_on_cpu()

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return tensor
        with unwatched():
            return plain.pack_hook(tensor)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with unwatched():
            tensor: torch.Tensor = plain.unpack_hook(packed)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
