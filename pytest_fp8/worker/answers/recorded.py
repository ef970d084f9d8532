"""The arm's recorded step: one uncompiled step from known weights, for all that watch a step. It changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pytest_fp8.questions.ledger.evidence import OUTSIDE, OptimizerNote
from pytest_fp8.worker.notes import optimizer_note, random_state, switches_of
from pytest_fp8.worker.record.accuracy import kept_numbers
from pytest_fp8.worker.record.clock import compiled_frames
from pytest_fp8.worker.record.gradients import GradientSketches, norm_of
from pytest_fp8.worker.record.probe import ProductChecks
from pytest_fp8.worker.record.recorder import StepRecorder, StepTable
from pytest_fp8.worker.record.tables import work_of
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.tensors import parts, unwatched
from pytest_fp8.worker.training.ranks import every_rank_s
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import on_steps
from pytest_fp8.zoo.batch import with_tensors

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

SEED = 0
"""Of the weights and the batch of the step: the same in every arm."""
RANDOM = 1_907_201_853
"""Added for the generators: a seed that nobody uses, so that a model that seeds them anew in each step (0, 42) leaves
them elsewhere than one that does not."""
OWN_PASSES = 2
"""Until scales fit that a fresh layer takes from the pass before: those of gradients depend on the forward pass's."""
MOST_PASSES = 12
"""Of fitting scales. What saturates in one layer is too small in all that come after it, so that a pass fits a few
layers. Emulated on a CPU, 182M takes six passes afresh, and five after batches of 43 times as many tokens: with two,
gradients of 13 of 112 layers were up to 7.6 times what their scales were made for (docs/measurements.md)."""
SETTLED = 1.25
"""A scale that fits moves by less in a pass: each pass rounds otherwise, by 5 to 15 %."""
TOKENS = 1152
"""Most tokens of a recorded batch of the suite's models, on each rank. Which layer multiplies what does not depend on
their number, but memory does: an uncompiled step of 8B keeps 10 MiB a token, and 4096 tokens find no room beside the
weights on 80 GB. A multiple of the 128 values of a scaling block, and no size of a feature, from which roles are read.
"""


def recorded_batch(engine: Engine, seed: int, step: int) -> Any:
    """The batch of a recorded step, the same in every arm: that of the training step; of a large one of the suite's
    models the first :data:`TOKENS` tokens, as one sequence."""
    batch = engine.training_batch(seed, step)
    return with_tensors(batch, lambda each: each.reshape(1, -1)[:, :TOKENS]) if is_cut(engine) else batch


def is_cut(engine: Engine) -> bool:
    """Whether recorded batches have fewer tokens than those of training."""
    return _trained_tokens(engine) > TOKENS


def _trained_tokens(engine: Engine) -> int:
    """Of the suite's models, on each rank; of a user's 0."""
    return math.prod(engine.case.tokens or (0,)) // engine.case.gpus


def as_in_training(table: StepTable, tokens: int) -> None:
    """Give calls and products of a batch that was cut as many tokens as a training step has."""

    def size(recorded: int) -> int:
        return tokens if recorded == TOKENS else recorded

    for call in table.calls:
        call.tensors = [(tuple(map(size, shape)), dtype) for shape, dtype in call.tensors]
    for event in table.events:
        event.products = [
            replace(each, inner=size(each.inner), outer=(size(each.outer[0]), size(each.outer[1])))
            for each in event.products
        ]


class Observer(Protocol):
    """Watches the step. Both contexts may change hooks and dispatch modes, and must leave none behind."""

    def watching(self) -> AbstractContextManager[Any]:
        """Opened once, around the whole step."""

    def in_phase(self, name: str) -> AbstractContextManager[Any]:
        """Opened around each part of the step: ``forward``, ``backward``, ``optimizer``, ``evaluation``. Micro-batches
        alternate, so that a part comes several times."""


@dataclass(frozen=True)
class Recorded:
    """What was seen of one step."""

    step: StepNotes
    loss: torch.Tensor
    products: list[dict[str, Any]]
    """:meth:`ProductChecks.checks`."""
    handed_on: list[dict[str, Any]]
    """:meth:`ProductChecks.handed_on`."""
    gradients: dict[str, Any] | None
    """:meth:`GradientSketches.noted`. ``None`` where those of a step as the arm runs it are others: code is compiled,
    which runs uncompiled here, or the batch has few of its tokens."""


@lru_cache(4)
def recorded(engine: Engine, seed: int) -> Recorded:
    """The arm's recorded step from the weights of ``seed``; it runs once, and later calls give the same."""
    start_over(engine, seed)
    step, products = StepNotes(engine), ProductChecks(engine)
    others = engine.compiled or compiled_frames() or is_cut(engine)
    sketches = [] if others else [GradientSketches(engine)]
    loss = observed_step(engine, step, products, *sketches, seed=seed)
    # As plain data: observers hold tensors on the device, which the memory question would count.
    gradients = [each.noted(engine.training_batch(seed, 0), loss) for each in sketches]
    return Recorded(step, loss, products.checks(), products.handed_on(), next(iter(gradients), None))


def start_over(engine: Engine, seed: int) -> None:
    """Restart the arm, in the modes in which its first steps left its modules, whatever was trained since."""
    engine.restart(seed)
    fit_scales_to_recorded(engine, seed)
    for module, training in engine.modes.items():
        module.training = training


def observed_step(engine: Engine, *observers: Observer, seed: int = SEED, step: int = 0) -> torch.Tensor:
    """One step in which both arms do the same work, from where the arm is; gives its loss, detached.

    It gets the batch of this step of the seed's curve, of the suite's models the beginning of it, and draws from
    generators that are seeded alike, so that dropout masks are the same in both arms. Compiled code runs uncompiled.
    The step changes nothing.
    """
    batch = recorded_batch(engine, seed, step)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer.in_phase(name))
            yield

    with ExitStack() as stack:
        stack.enter_context(unchanged(engine))
        seed_generators(RANDOM + seed)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for observer in observers:
            stack.enter_context(observer.watching())
        loss = engine.step(batch, phase=phase)
    engine.park()
    return loss


def fit_scales_to_recorded(engine: Engine, seed: int, step: int = 0) -> None:
    """:func:`fit_scales` to the batch of the recorded step. Of fewer tokens the mean loss has larger gradients."""
    with torch.compiler.set_stance("force_eager"):
        fit_scales(engine, lambda: recorded_batch(engine, seed, step))


def fit_scales(engine: Engine, draw: Callable[[], Any]) -> None:
    """Let delayed scaling see the batch that is about to be measured, which ``draw`` gives: its scales are those of
    past steps.

    A fresh model's first scales fit badly, which says nothing of the layer. Seen on an H200: after the two calibration
    passes of a restart, on another batch, a gradient of a 1B model is 31 dB worse than the recipe's own casts make it.
    The same holds for layers of the user's own that keep numbers to scale by.
    """
    is_fp8 = engine.is_fp8_layer
    own = any(is_fp8(module) and kept_numbers(module) for module in engine.model.modules())
    least = engine.calibration_passes or OWN_PASSES * own
    for done in range(MOST_PASSES if least else 0):
        before = _scales(engine)
        engine.calibrate(1, lambda _: draw())
        moved = (_scales(engine) / before).log2().abs().amax() if len(before) else torch.zeros(())
        # Ranks that stop apart would wait for each other.
        if done + 1 >= least and max(every_rank_s(float(moved))) <= math.log2(SETTLED):
            break


def _scales(engine: Engine) -> torch.Tensor:
    """Those that the library keeps for operands from pass to pass, of all FP8 layers."""
    layers = [module for module in engine.model.modules() if engine.is_fp8_layer(module)]
    kept = [each for each in map(engine.backend.scaling, layers) if each is not None]
    scales = [scale.detach().flatten() for each in kept for scale in each.operands.values()]
    return torch.cat(scales) if scales else torch.empty(0)


class StepNotes:
    """The recorder, and what stands around the step: gradients, optimizer, generators, torch's switches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.recorder = StepRecorder(engine.model, engine.backend, engine.originals)
        self.table = self.recorder.table
        self.backward = self.stepped = 0
        self.switches: dict[str, str] = {}
        self.switches_after: dict[str, str] = {}
        self.gradients: list[str] = []
        self.norm_kept = 1.0
        self.optimizer: OptimizerNote
        self.random = ""
        self._norm = math.nan

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.recorder.on_first_call = self._read_switches
            stack.enter_context(self.recorder.watching())
            stack.enter_context(on_steps(self._engine.optimizer, self._before_step))
            # Before the step: a schedule may note the loss, which FP8 moves.
            self.optimizer = optimizer_note(self._engine.optimizer, self._engine.model)
            yield
            if is_cut(self._engine):
                as_in_training(self.table, _trained_tokens(self._engine))
            self.switches_after = switches_of(self._engine.device)
            self.random = random_state()

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        with self.recorder.in_phase(name):
            yield
        if name == "backward":
            self.backward += 1
            self._norm = self._total_norm()

    def _read_switches(self) -> None:
        self.switches = switches_of(self._engine.device)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the gradients when the optimizer steps. Its step changes no weight here, and runs no hook."""
        self.stepped += 1
        engine = self._engine
        live = [(n, p) for n, p in engine.model.named_parameters(remove_duplicate=False) if p.grad is not None]
        self.gradients = sorted({part for name, value in live for part, _ in parts(name, value)})
        if self._norm > 0:
            self.norm_kept = self._total_norm() / self._norm

    def other_work(self, other: StepNotes) -> set[str]:
        """The modules that did other work in another record of the step."""
        one, two = work_of(self.table), work_of(other.table)
        found = {name for name in (*one, *two) if one.get(name) != two.get(name)}
        alike = (self.backward, self.stepped) == (other.backward, other.stepped)
        return found if alike else {*found, OUTSIDE}

    def _total_norm(self) -> float:
        gradients = [p.grad for p in self._engine.model.parameters() if p.grad is not None]
        with unwatched():
            return float(norm_of(gradients)) if gradients else math.nan
