"""An arm's ledger: what its recorded step did and what stands around it, as plain data."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import PARTS
from pytest_fp8.plain import in_text
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ArmLedger, Entered, TensorNote, Updates
from pytest_fp8.worker.answers.recorded import (
    RANDOM,
    SEED,
    Recorded,
    StepNotes,
    observed_step,
    recorded,
    recorded_batch,
    start_over,
)
from pytest_fp8.worker.record.gradients import norm_of, rotated, sketch
from pytest_fp8.worker.record.operators import dtype_name
from pytest_fp8.worker.record.recorder import notes_of
from pytest_fp8.worker.record.tables import ledger_rows, may_route
from pytest_fp8.worker.state.weights import PERTURBATION, moved_weights
from pytest_fp8.worker.tensors import Sharded, held, is_plain, plain_name
from pytest_fp8.worker.training.ranks import every_rank_s, rank
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import closure_of, innermost, on_steps

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


@lru_cache(4)
def ledger_of(engine: Engine) -> ArmLedger:
    """The arm's ledger, of its recorded step. It is taken once."""
    batch = notes_of(recorded_batch(engine, SEED, step=0))
    # First, whoever asks first: the optimizer's steps leave the modes of training behind.
    record = recorded(engine, SEED)
    seen = record.step
    routed, entered = _moved(engine, record, batch)
    made = _updates(engine)
    return ArmLedger(
        batch=batch,
        entered=entered,
        backward=seen.backward,
        stepped=seen.stepped,
        gradients=seen.gradients,
        norm_kept=seen.norm_kept,
        loss=float(record.loss),
        loss_dtype=dtype_name(record.loss),
        random=seen.random,
        before=engine.weights[0],
        after=engine.weights[1],
        optimizer=seen.optimizer,
        updates=made,
        switches=seen.switches,
        switches_after=seen.switches_after,
        fp8_layers=fp8_layers(engine),
        linears=[plain_name(name) for name in engine.originals],
        routed=routed,
        ranks=engine.case.gpus,
        **ledger_rows(seen.table),
    )


def _updates(engine: Engine) -> Updates:
    """None where the optimizer's state does not fit beside the other arm."""
    try:
        return updates(engine)
    except torch.OutOfMemoryError:
        if engine.case.gpus > 1:
            raise
    engine.park()
    return NO_UPDATES


MOVES = (PERTURBATION, 2.0**-2, 2.0**-1)
"""How far weights are moved to see what follows from them. Larger moves than FP8's: a router that sends one row in a
hundred elsewhere for FP8 alone should not send all as before in each of these."""


def _moved(engine: Engine, record: Recorded, batch: Sequence[TensorNote]) -> tuple[list[str], list[Entered]]:
    """The modules that do other work where the weights are moved; and what entered, without the digests of what then
    differs. A digest that differs in a repetition, too, follows from something else, and stays.

    Tried where the host reads a value, where rows are chosen, and where something enters that is not of the batch.
    """
    seen, first = record.step, record.step.table.entered
    made = _digests(first[1:]) - _digests(first[:1]) - {note.digest for note in batch}
    if not any(every_rank_s(bool(made) or may_route(seen.table))):
        return [], first
    # Other answers may have trained the arm since its step was recorded.
    start_over(engine, SEED)
    found: list[StepNotes] = []
    for draw, by in enumerate((0.0, *MOVES)):
        found.append(StepNotes(engine))
        with moved_weights(engine, draw, by):
            observed_step(engine, found[-1])
    repeated, *moved = [_digests(each.table.entered) for each in found]
    follows = {digest for digest in made & repeated if not all(digest in each for each in moved)}
    entered = [
        replace(call, tensors=[replace(note, digest="") if note.digest in follows else note for note in call.tensors])
        for call in first
    ]
    return sorted({name for each in found for name in seen.other_work(each)}), entered


def _digests(calls: Sequence[Entered]) -> set[str]:
    return {note.digest for call in calls for note in call.tensors} - {""}


def fp8_layers(engine: Engine) -> list[str]:
    """Layers that are meant to be in FP8, and live ones that are."""
    live = {name for name, module in engine.model.named_modules() if engine.is_fp8_layer(module)}
    return sorted(plain_name(name) for name in live | set(engine.conversion.converted))


# -- what the optimizer makes of equal gradients ----------------------------------------------------------------------

STEPS = 3
"""A first update of Adam is the gradient's sign alone; from the second on its size counts, too."""
BASE = 4.0
"""Gradients get the arm's own size, rounded to a power of this, so that arms whose gradients differ by FP8's 5 to 11 %
get the same numbers. Where the rounding separates them nothing is compared."""


def updates(engine: Engine) -> Updates:
    """Some training steps from the weights of :data:`SEED`, each gradient replaced by seeded numbers just before the
    optimizer steps. Restart the arm afterwards.

    Nothing is told of an optimizer that is given a closure: the loss that it returns may decide the update.
    """
    engine.restart(SEED)
    given = _Given(engine)
    with on_steps(engine.optimizer, given.before_step):
        for step in range(STEPS):
            engine.step(engine.training_batch(SEED, step))
            if given.closures:
                break
    told = given.told()
    engine.park()
    return told


class _Given:
    """Gives gradients, and remembers where the weights that get them stood."""

    def __init__(self, engine: Engine) -> None:
        self._steps, self._size, self.closures = 0, 0.0, False
        stepped = {id(p) for group in innermost(engine.optimizer).param_groups for p in group["params"]}
        self._weights = {
            plain_name(name): parameter
            for name, parameter in engine.model.named_parameters()
            if id(parameter) in stepped and not hasattr(parameter, PARTS) and is_plain(parameter) and parameter.numel()
        }
        self._places = rotated(engine.device)
        self._start: dict[str, torch.Tensor] = {}

    def before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.closures |= closure_of(args, kwargs) is not None
        live = {name: weight for name, weight in self._weights.items() if weight.grad is not None}
        if self.closures or not live:
            return
        self._size = self._size or _size([weight.grad for weight in live.values()])
        for name, weight in live.items():
            if name not in self._start:
                self._start[name] = self._sketch(name, weight)
            # Each rank gets numbers of its own, the same in both arms: an optimizer may reduce them over the ranks.
            seed = zlib.crc32(f"{name} {self._steps} {rank()}".encode())
            gradient: Any = weight.grad
            made = _numbers(held(gradient).local(), self._size, seed)
            weight.grad = gradient if Sharded.has(gradient) else made
        self._steps += 1
        # For an optimizer that rounds stochastically.
        seed_generators(RANDOM + self._steps)

    def told(self) -> Updates:
        if self.closures or not self._size:
            return NO_UPDATES
        moved = {name: self._sketch(name, self._weights[name]) - start for name, start in self._start.items()}
        return Updates(
            steps=self._steps,
            size=self._size,
            sketches={name: in_text(each.cpu().numpy()) for name, each in moved.items()},
        )

    def _sketch(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return sketch(held(weight).local(), zlib.crc32(name.encode()), self._places)


def _size(gradients: list[Any]) -> float:
    """Their root mean square, rounded to a power of :data:`BASE`; 0 where it is none."""
    count = sum(gradient.numel() for gradient in gradients)
    mean = float(norm_of(gradients)) / math.sqrt(count)
    return BASE ** round(math.log(mean, BASE)) if mean > 0 and math.isfinite(mean) else 0.0


@torch.no_grad()
def _numbers(gradient: Any, size: float, seed: int) -> torch.Tensor:
    """Normal numbers in the gradient's place: of its dtype, and where it is sparse in its rows."""
    generator = torch.Generator(device=gradient.device).manual_seed(seed)
    if gradient.is_sparse:
        rows = gradient.coalesce()
        values = torch.empty_like(rows.values()).normal_(0, size, generator=generator)
        return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, is_coalesced=True)
    return gradient.normal_(0, size, generator=generator)  # type: ignore[no-any-return]
