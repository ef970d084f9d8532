"""What an arm's optimizer makes of gradients that are the same in both arms, as digests and sketches of its updates."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.floats import in_text
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, Updates
from pytest_fp8.worker.answers.recorded import RANDOM, SEED
from pytest_fp8.worker.notes import digest_of
from pytest_fp8.worker.record.gradients import norm_of, rotated, sketch
from pytest_fp8.worker.tensors import is_plain, is_sharded, local, plain_name
from pytest_fp8.worker.training.ranks import rank
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import around_step, closure_of, innermost

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

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
    with around_step(engine.optimizer, given.before_step):
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
        fused = engine.fused_params
        self._weights = {
            plain_name(name): parameter
            for name, parameter in engine.model.named_parameters()
            if id(parameter) in stepped and name not in fused and is_plain(parameter) and parameter.numel()
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
            made = _numbers(local(gradient), self._size, seed)
            weight.grad = gradient if is_sharded(gradient) else made
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
            digests={name: digest_of(local(self._weights[name]).detach()) for name in moved},
            sketches={name: in_text(each.cpu().numpy()) for name, each in moved.items()},
        )

    def _sketch(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        return sketch(local(weight), zlib.crc32(name.encode()), self._places)


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
