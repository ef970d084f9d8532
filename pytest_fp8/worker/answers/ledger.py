"""An arm's ledger: what one instrumented step did and what stands around it, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ArmLedger, TensorNote, Updates
from pytest_fp8.worker.answers.gradients import total_norm
from pytest_fp8.worker.answers.instrumented import SEED, Observer, instrumented_step
from pytest_fp8.worker.answers.updates import updates
from pytest_fp8.worker.state.fused_params import plain_name, split
from pytest_fp8.worker.training.phases import around_step
from pytest_fp8.worker.training.ranks import room_for_activations, uncompiled_step_fits
from pytest_fp8.worker.watch.activations import kept_on_host
from pytest_fp8.worker.watch.ledger_modules import digest_of, shape_of
from pytest_fp8.worker.watch.ledger_operators import OperatorWatch
from pytest_fp8.worker.watch.ledger_weights import optimizer_note, random_state, switches_of
from pytest_fp8.worker.watch.operators import dtype_name
from pytest_fp8.worker.watch.second_forward import SecondForward
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.case import Case
    from pytest_fp8.worker.run.engine import Engine


class StepLedger:
    """An observer of the instrumented step (:class:`pytest_fp8.worker.answers.instrumented.Observer`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A library that brings compiled code and functional transforms of its own refuses to have its operators
        # watched; its modules are watched all the same.
        self.watched = not engine.backend.compiles_itself
        self.operators = OperatorWatch(engine.model, frozenset(fp8_layers(engine)))
        self.operators.modules.on_call = self._on_call
        self.inputs, self.draws = SecondForward(), SecondForward()
        self.operators.modules.on_input = self._on_input
        self.operators.on_draw = self._on_draw
        self._linears = {plain_name(name) for name in engine.originals}
        self.backward = self.stepped = 0
        self.switches: dict[str, str] = {}
        self.switches_after: dict[str, str] = {}
        self.gradients: list[str] = []
        self.norm_kept = 1.0
        self.random = ""
        self._norm = math.nan

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.operators.watching())
            stack.enter_context(around_step(self._engine.optimizer, self._before_step))
            yield
            self.switches_after = switches_of(self._engine.device)
            self.random = random_state()

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        with self.operators.in_phase(name, dispatch=self.watched):
            yield
        if name == "backward":
            self.backward += 1
            self._norm = self._total_norm()

    def _on_call(self, name: str) -> None:
        if not self.switches and self.operators.phase == "forward":
            self.switches = switches_of(self._engine.device)

    def _on_input(self, name: str, tensor: torch.Tensor, again: bool) -> None:
        if name in self._linears:
            self.inputs.note(name, name, tensor, again)

    def _on_draw(self, operator: str, tensor: torch.Tensor, again: bool) -> None:
        # Whose draw it is can be told for sure in the forward pass alone.
        self.draws.note(operator, self.operators.modules.owner(), tensor, again)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the gradients when the optimizer steps. Its step changes no weight here, and runs no hook."""
        self.stepped += 1
        engine = self._engine
        live = [(n, p) for n, p in engine.model.named_parameters(remove_duplicate=False) if p.grad is not None]
        self.gradients = sorted({plain_name(part) for part, _ in split(live, engine.fused_params)})
        if self._norm > 0:
            self.norm_kept = self._total_norm() / self._norm

    def _total_norm(self) -> float:
        gradients = [p.grad for p in self._engine.model.parameters() if p.grad is not None]
        # Not watched: it is no part of the step.
        with _disable_current_modes():
            return total_norm(gradients) if gradients else math.nan


_LEDGERS: WeakKeyDictionary[Engine, ArmLedger] = WeakKeyDictionary()


def ledger_of(engine: Engine) -> ArmLedger:
    """The arm's ledger; the step runs once, and later calls give the same."""
    if engine not in _LEDGERS:
        _LEDGERS[engine] = _taken(engine)
    return _LEDGERS[engine]


def _taken(engine: Engine) -> ArmLedger:
    batch = [note_of(tensor) for tensor in tensors_in(engine.training_batch(SEED, step=0))]
    made = _updates(engine)
    seen, loss = _watched_step(engine)
    optimizer = optimizer_note(engine.optimizer, engine.model, engine.fused_params)
    operators, modules = seen.operators, seen.operators.modules
    return ArmLedger(
        batch=batch,
        entered=modules.entered,
        calls=modules.counted(),
        classes=modules.classes,
        products=operators.products,
        operators={owner: dict(counts) for owner, counts in operators.operators.items()},
        waits=dict(operators.waits),
        backward=seen.backward,
        stepped=seen.stepped,
        gradients=seen.gradients,
        norm_kept=seen.norm_kept,
        loss=float(loss),
        loss_dtype=dtype_name(loss),
        random=seen.random,
        draws=operators.draws,
        before=engine.weights[0],
        after=engine.weights[1],
        optimizer=optimizer,
        updates=made,
        switches=seen.switches,
        switches_after=seen.switches_after,
        fp8_layers=fp8_layers(engine),
        linears=[plain_name(name) for name in engine.originals],
        uncertain=operators.uncertain,
        ranks=engine.case.gpus,
        wire=[replace(one, count=count) for one, count in operators.wire.items()],
        watched=seen.watched,
        # What was drawn names the layer less surely.
        recomputed_otherwise=seen.inputs.other() or seen.draws.other(),
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


def _watched_step(engine: Engine) -> tuple[StepLedger, torch.Tensor]:
    """The instrumented step; with activations in the host's memory where they do not fit the GPU. Several ranks cannot
    try: they decide it together beforehand."""
    seen = StepLedger(engine)
    try:
        fits = uncompiled_step_fits(engine.case, engine.device, engine.backend.uncompiled_over_compiled)
        others = () if fits else (_OnHost(engine.case),)
        return seen, instrumented_step(engine, *others, seen)
    except torch.OutOfMemoryError:
        if engine.case.gpus > 1:
            raise
    # Not inside the handler: its traceback holds what was allocated.
    engine.park()
    seen = StepLedger(engine)
    return seen, instrumented_step(engine, _OnHost(engine.case), seen)


class _OnHost(Observer):
    """Large activations of the step that find no room wait in the host's memory. Not those of the compiled steps before
    it."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def watching(self) -> AbstractContextManager[Any]:
        return kept_on_host(room_for_activations(self._case))


def note_of(tensor: torch.Tensor) -> TensorNote:
    return TensorNote(shape_of(tensor), dtype_name(tensor), digest_of(tensor))


def fp8_layers(engine: Engine) -> list[str]:
    """Layers that are meant to be in FP8, and live ones that are."""
    live = {name for name, module in engine.model.named_modules() if engine.backend.is_fp8_layer(module)}
    return sorted(plain_name(name) for name in live | set(engine.conversion.converted))
