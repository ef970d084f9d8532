"""Sketches of the gradients of one training step: few numbers for each parameter, equal ones for equal gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.floats import in_text
from pytest_fp8.questions.numerics.evidence import BUCKETS
from pytest_fp8.worker.answers.instrumented import SEED, fit_scales
from pytest_fp8.worker.answers.moved_weights import moved_operands, moved_weights
from pytest_fp8.worker.run.curves import norm_of
from pytest_fp8.worker.state.training_state import buffers_kept
from pytest_fp8.worker.tensors import plain_name, split, values_of, whole_gradient
from pytest_fp8.worker.training.restored import hooked, hooks_of
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.watch.ledger_weights import random_state
from pytest_fp8.zoo import data
from pytest_fp8.zoo.training import Phase

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

CHUNK_ROWS = 4096
"""Rows of :data:`BUCKETS` values that are summed at a time: 4 M values, 16 MB of random signs."""

DRAW_APART = 1_000_003
"""Between the seeds of draws, so that no draw of one seed is that of another."""


def gradients(engine: Engine, seed: int) -> dict[str, Any]:
    """One step as the arm runs it, from the weights that it has; no weight moves. As plain data, the fields of
    :class:`pytest_fp8.questions.numerics.evidence.Gradients`.

    A step that draws random numbers is run again uncompiled: dropout's masks agree between the arms only there.
    """
    # One after the other, so that each starts from the same buffers: a codebook that moves in each forward pass would
    # else look like a model that any small change moves.
    with buffers_kept(engine.model):
        found, drew = _gradients(engine, seed)
    if drew and engine.compiled:
        with buffers_kept(engine.model), torch.compiler.set_stance("force_eager"):
            return _gradients(engine, seed)[0]
    return found


def moved_gradients(engine: Engine, seed: int, draw: int = 0) -> dict[str, Any]:
    """The same with the weights of all Linears moved by as much as FP8 moves products.

    How far gradients then move tells how far sound FP8 may move them: a router sends some rows to other experts, a deep
    model amplifies. The weights are put back. ``draw`` says in which of many ways they are moved.
    """
    with moved_weights(engine, seed + DRAW_APART * draw):
        return gradients(engine, seed)


def further_moved_gradients(engine: Engine, draws: int, operands: int, seed: int) -> list[dict[str, Any]]:
    """The same for ``draws`` further ways, from the weights of ``seed``; and for ``operands`` ways of moving what
    Linears are given instead, each value on its own. These run uncompiled, which takes more memory: where that is not
    there they are left out, as a gradient that is wrong beside moved weights is no error of memory."""
    engine.restart(seed)
    found = [moved_gradients(engine, seed, draw) for draw in range(1, draws + 1)]
    # Of several ranks one may be alone in this, and the others in a collective.
    short = [torch.OutOfMemoryError] if engine.case.gpus == 1 else []
    with suppress(*short):
        for draw in range(operands):
            with moved_operands(engine, seed + DRAW_APART * draw):
                found.append(gradients(engine, seed))
    return found


def _gradients(engine: Engine, seed: int) -> tuple[dict[str, Any], bool]:
    """The gradients; and whether the step drew random numbers."""
    engine.renew_scales()
    fit_scales(engine, seed)
    batch = engine.training_batch(seed, step=0)
    seed_generators(seed)
    sketches: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    before = random_state()
    with engine.standing_still(), sketched(engine, sketches, filled) as (reached, phase):
        loss = engine.step(batch, phase)
    silent = sorted(
        plain_name(name)
        for name, parameter in engine.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and id(parameter) not in reached
    )
    drew = before != random_state()
    engine.park()
    found = {
        "sketches": {name: in_text(each.cpu().numpy()) for name, each in sketches.items()},
        "silent": silent,
        "loss": float(loss),
        "data": data.fingerprint(batch),
        "random": random_state(),
        "zeros": {name: 1 - float(share) for name, share in filled.items()},
        "apart": "",
    }
    return found, drew


@contextmanager
def sketched(
    engine: Engine, sketches: dict[str, torch.Tensor], filled: dict[str, torch.Tensor]
) -> Iterator[tuple[set[int], Phase]]:
    """While open, note each parameter's gradient whenever it was accumulated; the last one counts. Gives the ids of the
    parameters that got one, and the phase to run the step with. ``filled``: for the share of values that are not 0.

    Hooks of the parameters and not of the optimizer, because a step of the user's own clips gradients before that. With
    several ranks at the end of each backward pass, when most ways have reduced them; of a sharded one the whole.
    """
    fused, places = engine.fused_params, rotated(engine.device)
    reached: set[int] = set()

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            whole = whole_gradient(parameter)
            if whole is None:
                return
            reached.add(id(parameter))
            for part, gradient in split([(name, whole)], fused):
                plain = plain_name(part)
                sketches.pop(plain, None)
                sketches[plain] = sketch(gradient, zlib.crc32(plain.encode()), places)
                filled[plain] = torch.count_nonzero(values_of(gradient)) / max(gradient.numel(), 1)

        return note

    trained = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    if engine.case.gpus > 1:

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            yield
            for one, parameter in trained if name == "backward" else ():
                noting(one)(parameter)

        yield reached, phase
        return
    with hooked([handle for name, p in trained for handle in _around_others(p, noting(name))]):
        yield reached, nullcontext


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


def total_norm(gradients: Sequence[Any]) -> float:
    """The norm of all of them together."""
    return float(norm_of(list(gradients)))


def rotated(device: torch.device) -> torch.Tensor:
    """For each row of a chunk, which value goes into which bucket. 32 MiB: not kept, for the memory question counts
    what an arm holds."""
    generator = torch.Generator().manual_seed(SEED)
    turns = torch.randint(0, BUCKETS, (CHUNK_ROWS, 1), generator=generator)
    return ((torch.arange(BUCKETS) + turns) % BUCKETS).to(device)
