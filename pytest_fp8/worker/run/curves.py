"""One training run of an arm, step by step: its losses, its gradients, how far its weights moved, how much ran in FP8.

A curve trains with the arm's own step, compiled as it is. What is read beside it changes no number of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.evidence import LayerCalls, ProductCount
from pytest_fp8.worker.run.call_watch import CallWatch, WatchedEngine
from pytest_fp8.worker.run.course import TrainingCourse
from pytest_fp8.worker.state.shards import full, values_of
from pytest_fp8.worker.training import zero
from pytest_fp8.worker.watch.ledger_weights import weights_of
from pytest_fp8.worker.watch.presence import counted_step
from pytest_fp8.zoo import data, training


class TrainingEngine(WatchedEngine, Protocol):
    """What a curve needs of the engine."""

    optimizer: torch.optim.Optimizer
    originals: dict[str, tuple[int, int]]
    compiled: bool

    @property
    def fused_params(self) -> FusedParams: ...

    def restart(self, seed: int, jitter: bool = False) -> None: ...

    def training_batch(self, seed: int, step: int) -> Any: ...

    def step(
        self,
        batch: Any,
        phase: training.Phase = nullcontext,
        on_gradients: Callable[[], None] | None = None,
    ) -> torch.Tensor: ...


def curve(
    engine: TrainingEngine, seed: int, steps: int, jitter: bool = False, first_step: int = 0, watch: bool = False
) -> dict[str, Any]:
    """``steps`` training steps from the weights of ``seed``, with ``first_step`` from where the arm is; the fields of
    ``questions.loss.evidence.Curve``.

    ``watch``: count the products of the last step, and in the curve of seed 0 those of the first one. On a GPU each is
    a profile of that step. In each step look at the calls of the FP8 layers.
    """
    if first_step == 0:
        engine.restart(seed, jitter)
    losses: list[torch.Tensor] = []
    eps = 0.0
    norms: list[torch.Tensor] = []
    fingerprint = 0
    course = TrainingCourse(engine.model, engine.optimizer, engine.fused_params)
    counts: dict[int, Mapping[str, ProductCount]] = {}
    calls = CallWatch(engine, engine.compiled, seed) if watch else None

    def note_gradients() -> None:
        live = list(engine.model.parameters())
        partitioned = zero.gradient_norm(live)
        norms.append(norm_of([p.grad for p in live if p.grad is not None]) if partitioned is None else partitioned)
        course.note_gradients()

    last = first_step + steps - 1
    with course.watching(), calls.watching() if calls is not None else nullcontext():
        for step in range(first_step, first_step + steps):
            batch = engine.training_batch(seed, step)
            fingerprint = data.fingerprint(batch, fingerprint)
            if calls is not None:
                calls.next_step()
            if watch and (step == last or step == seed == 0):
                loss, counts[step] = counted_step(engine, batch, note_gradients)
            else:
                loss = engine.step(batch, on_gradients=note_gradients)
            losses.append(loss.float())
            eps = torch.finfo(loss.dtype).eps
            course.note_training_step()
            # A hand-written step may step its optimizer twice, or not at all, as where its loss is not finite.
            norms[step - first_step :] = norms[step - first_step :][-1:] or [losses[-1] * 0]
    return {
        **({"weights": _whole_weights(engine)} if engine.case.gpus > 1 else {}),
        "seed": seed,
        "losses": [float(x) for x in torch.stack(losses).cpu()],
        "eps": eps,
        "gradient_norms": [float(x) for x in torch.stack(norms).cpu()],
        "data": fingerprint,
        "course": to_plain(course.noted()),
        "movement": to_plain(course.movement()),
        "first_products": to_plain(counts.get(0, {})),
        "last_products": to_plain(counts.get(last, {})),
        "calls": to_plain(calls.noted() if calls is not None else LayerCalls()),
    }


def _whole_weights(engine: TrainingEngine) -> dict[str, str]:
    """A digest of each trained weight of which every rank has the whole: the same one, as the ranks must agree."""
    noted = weights_of(engine.model, engine.fused_params)
    return {name: each.digest for name, each in noted.items() if each.trained and not each.buffer}


def norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all gradients together, in float32: bfloat16 has eight bits, in which two precisions can agree."""
    if not gradients:
        return torch.tensor(0.0)
    values = [values_of(gradient) for gradient in gradients]
    norms = [full(torch.linalg.vector_norm(v, dtype=torch.promote_types(v.dtype, torch.float32))) for v in values]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total.float()
