"""Sketches of the gradients of one training step: few numbers for each parameter, equal ones for equal gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.plain import in_text
from pytest_fp8.questions.numerics.evidence import BUCKETS
from pytest_fp8.worker.notes import random_state
from pytest_fp8.worker.tensors import held, parts, plain_name, unwatched, values_of
from pytest_fp8.worker.training.restored import hooked, hooks_of
from pytest_fp8.zoo import data

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

CHUNK_ROWS = 4096
"""Rows of :data:`BUCKETS` values that are summed at a time: 4 M values, 16 MB of random signs."""


class GradientSketches:
    """An observer of a step (:class:`pytest_fp8.worker.answers.recorded.Observer`): notes each parameter's gradient
    whenever it was accumulated; the last one counts.

    By hooks of the parameters and not of the optimizer, because a step of the user's own clips gradients before that.
    What a step sets by itself, as from ``torch.autograd.grad()``, is noted when the optimizer is given it. With several
    ranks at the end of each backward pass, when most ways have reduced them; of a sharded one the whole.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._places = engine, rotated(engine.device)
        self._trained = [(n, p) for n, p in engine.model.named_parameters(remove_duplicate=False) if p.requires_grad]
        self._sketches: dict[str, torch.Tensor] = {}
        self._reached: set[int] = set()
        self._random = self._random_before = ""

    @property
    def drew(self) -> bool:
        """Whether the step drew random numbers."""
        return self._random != self._random_before

    @contextmanager
    def watching(self) -> Iterator[None]:
        alone = dict(self._engine.model.named_parameters()) if self._engine.case.gpus == 1 else {}
        hooks = [_around_others(p, partial(self._note, name)) for name, p in alone.items() if p.requires_grad]
        self._random_before = random_state()
        with hooked(handle for handles in hooks for handle in handles):
            yield
        self._random = random_state()

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        if name == "optimizer" and self._engine.case.gpus == 1:
            for each, parameter in reversed(list(self._engine.model.named_parameters())):
                if parameter.requires_grad and id(parameter) not in self._reached:
                    self._note(each, parameter)
        yield
        if name == "backward" and self._engine.case.gpus > 1:
            for each, parameter in self._engine.model.named_parameters():
                if parameter.requires_grad:
                    self._note(each, parameter)

    def noted(self, batch: Any, loss: torch.Tensor) -> dict[str, Any]:
        """The fields of :class:`pytest_fp8.questions.numerics.evidence.Gradients`."""
        return {
            "sketches": {name: in_text(each.cpu().numpy()) for name, each in self._sketches.items()},
            "silent": sorted(plain_name(name) for name, each in self._trained if id(each) not in self._reached),
            "loss": float(loss),
            "data": data.fingerprint(batch),
            "random": self._random,
            "apart": "",
        }

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        with unwatched():
            whole = held(parameter).whole_gradient()
            if whole is None:
                return
            self._reached.add(id(parameter))
            for plain, gradient in parts(name, whole, of=parameter):
                self._sketches.pop(plain, None)
                self._sketches[plain] = sketch(gradient, zlib.crc32(plain.encode()), self._places)


def _around_others(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> list[Any]:
    """Register a hook that runs before the user's and again after them: one may change the gradient, and an optimizer
    that steps in the backward pass drops it."""
    others = list(hooks_of(parameter))
    handles = [parameter.register_post_accumulate_grad_hook(hook)]
    hooks = hooks_of(parameter)
    for key in others:
        # Autograd calls them in the order of a plain dict, which an OrderedDict's own moves do not change.
        hooks[key] = hooks.pop(key)
    return [*handles, *([parameter.register_post_accumulate_grad_hook(hook)] if others else [])]


@torch.no_grad()
def sketch(gradient: torch.Tensor, seed: int, places: torch.Tensor) -> torch.Tensor:
    """A count sketch: each value goes with a random sign of its own into one of :data:`BUCKETS` sums.

    It is linear and keeps lengths and angles: <sketch a, sketch b> is <a, b> within about |a| |b| / 32. Signs are drawn
    for each value, since gradients of weights are near low rank, where signs by row and column would cancel too little.
    Rows are rotated by random amounts: a gradient in a few columns would else fall into a few buckets. A parameter with
    at most :data:`BUCKETS` values is kept whole but for its signs. ``places``: of :func:`rotated`.
    """
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    flat = gradient.reshape(-1)
    generator = torch.Generator(device=flat.device).manual_seed(seed)
    total = torch.zeros(BUCKETS, dtype=torch.float32, device=flat.device)
    for chunk in flat.split(CHUNK_ROWS * BUCKETS):
        padded = torch.nn.functional.pad(chunk, (0, -chunk.numel() % BUCKETS)) if chunk.numel() % BUCKETS else chunk
        rows = padded.view(-1, BUCKETS).float()
        signs = torch.randint(0, 2, rows.shape, generator=generator, dtype=torch.int8, device=flat.device)
        total += (rows * (2 * signs - 1)).gather(1, places[: len(rows)]).sum(0)
    return total


def rotated(device: torch.device) -> torch.Tensor:
    """For each row of a chunk, which value goes into which bucket. 32 MiB: not kept, for the memory question counts
    what an arm holds."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.randint(0, BUCKETS, (CHUNK_ROWS, 1), generator=generator)
    return ((torch.arange(BUCKETS) + turns) % BUCKETS).to(device)


def norm_of_all(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of the parameters' gradients, on several ranks of all ranks' parts; on every rank at once."""
    every = [(held(p).gradient(), held(p).is_ranks_own) for p in parameters]
    found = [(gradient, own) for gradient, own in every if gradient is not None]
    norm = norm_of([gradient for gradient, own in found if not own])
    if own := [gradient for gradient, own in found if own]:
        squares = norm_of(own).square()
        least, most, by = squares.clone(), squares.clone(), torch.distributed.ReduceOp
        for values, how in ((squares, by.SUM), (least, by.MIN), (most, by.MAX)):
            torch.distributed.all_reduce(values, how)
        # What is as long on every rank are the same gradients, which all of them have whole. MIN and MAX drop a NaN.
        squares = torch.where((least == most) & squares.isfinite(), most, squares)
        norm = (norm.square().to(squares.device) + squares).sqrt()
    return norm


def norm_of(gradients: Sequence[Any]) -> torch.Tensor:
    """L2 norm of all gradients together, in float32: bfloat16 has eight bits, in which two precisions can agree."""
    if not gradients:
        return torch.tensor(0.0)
    values = [values_of(gradient) for gradient in gradients]
    norms = [torch.linalg.vector_norm(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in values]
    whole = [held(norm).whole() for norm in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]))
    return total.float()
