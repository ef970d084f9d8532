"""An arm's ledger: what one instrumented step did and what stands around it, as plain data."""

from __future__ import annotations

import dis
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.questions.ledger.differences import OUTSIDE
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ArmLedger, Entered, TensorNote, Updates
from pytest_fp8.worker.answers.instrumented import SEED, instrumented_step
from pytest_fp8.worker.answers.updates import updates
from pytest_fp8.worker.error_trace import code_of
from pytest_fp8.worker.record.gradients import norm_of
from pytest_fp8.worker.record.perturb import PERTURBATION, moved_weights
from pytest_fp8.worker.record.room import recorded_batch
from pytest_fp8.worker.tensors import plain_name, split
from pytest_fp8.worker.training.phases import around_step
from pytest_fp8.worker.training.ranks import every_rank_s
from pytest_fp8.worker.watch.ledger_modules import digest_of, shape_of
from pytest_fp8.worker.watch.ledger_operators import OperatorWatch
from pytest_fp8.worker.watch.ledger_weights import optimizer_note, random_state, switches_of
from pytest_fp8.worker.watch.operators import dtype_name
from pytest_fp8.worker.watch.second_forward import SecondForward
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


class StepLedger:
    """An observer of the instrumented step (:class:`pytest_fp8.worker.answers.instrumented.Observer`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A library that brings compiled code and functional transforms of its own refuses to have its operators
        # watched; its modules are watched all the same.
        self.watched = not engine.backend.brings_model
        self.operators = OperatorWatch(engine.model)
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

    def other_work(self, other: StepLedger) -> set[str]:
        """The modules that did other work in another record of the step."""
        one, two = self.operators.work(), other.operators.work()
        found = {name for name in (*one, *two) if one.get(name) != two.get(name)}
        alike = (self.backward, self.stepped) == (other.backward, other.stepped)
        return found if alike else {*found, OUTSIDE}

    def _total_norm(self) -> float:
        gradients = [p.grad for p in self._engine.model.parameters() if p.grad is not None]
        # Not watched: it is no part of the step.
        with _disable_current_modes():
            return float(norm_of(gradients)) if gradients else math.nan


_LEDGERS: WeakKeyDictionary[Engine, ArmLedger] = WeakKeyDictionary()


def ledger_of(engine: Engine) -> ArmLedger:
    """The arm's ledger; the step runs once, and later calls give the same."""
    if engine not in _LEDGERS:
        _LEDGERS[engine] = _taken(engine)
    return _LEDGERS[engine]


def _taken(engine: Engine) -> ArmLedger:
    batch = [note_of(tensor) for tensor in tensors_in(recorded_batch(engine, SEED, step=0))]
    made = _updates(engine)
    seen = StepLedger(engine)
    loss = instrumented_step(engine, seen)
    routed, entered = _moved(engine, seen, batch)
    optimizer = optimizer_note(engine.optimizer, engine.model, engine.fused_params)
    operators, modules = seen.operators, seen.operators.modules
    return ArmLedger(
        batch=batch,
        entered=entered,
        calls=modules.counted(),
        classes=modules.classes,
        products=operators.products,
        operators={owner: dict(counts) for owner, counts in operators.operators.items()},
        waits={owner: dict(counts) for owner, counts in operators.waits.items()},
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
        routed=routed,
        kept=_kept(engine.setup.own.batch) if engine.setup.own is not None else (),
        ranks=engine.case.gpus,
        wire=[replace(one, count=count) for one, count in operators.wire.items()],
        watched=seen.watched,
        # What was drawn names the layer less surely.
        recomputed_otherwise=seen.inputs.other() or seen.draws.other(),
    )


def _kept(batch: Any) -> list[str]:
    """What a function sets that outlives its call: globals, variables of the function around it, its own attributes."""
    code = code_of(batch)
    stored: dict[str, list[str]] = {}
    for each in dis.get_instructions(code) if code is not None else ():
        stored.setdefault(each.opname, []).append(str(each.argval))
    own = code is not None and code.co_varnames[:1] == ("self",)
    around = [name for name in stored.get("STORE_DEREF", ()) if code is not None and name in code.co_freevars]
    attributes = [f"self.{name}" for name in stored.get("STORE_ATTR", ()) if own]
    return list(dict.fromkeys([*stored.get("STORE_GLOBAL", ()), *around, *attributes]))


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


def _moved(engine: Engine, seen: StepLedger, batch: Sequence[TensorNote]) -> tuple[list[str], list[Entered]]:
    """The modules that do other work where the weights are moved; and what entered, without the digests of what then
    differs. A digest that differs in a repetition, too, follows from something else, and stays.

    Tried where the host reads a value, where rows are chosen, and where something enters that is not of the batch.
    """
    first = seen.operators.modules.entered
    made = _digests(first[1:]) - _digests(first[:1]) - {note.digest for note in batch}
    if not any(every_rank_s(bool(made) or seen.operators.may_route)):
        return [], first
    found: list[StepLedger] = []
    for draw, by in enumerate((0.0, *MOVES)):
        found.append(StepLedger(engine))
        with moved_weights(engine, draw, by, beside=seen.operators.modules.adopted):
            instrumented_step(engine, found[-1], restart=False)
    repeated, *moved = [_digests(each.operators.modules.entered) for each in found]
    follows = {digest for digest in made & repeated if not all(digest in each for each in moved)}
    entered = [
        replace(call, tensors=[replace(note, digest="") if note.digest in follows else note for note in call.tensors])
        for call in first
    ]
    return sorted({name for each in found for name in seen.other_work(each)}), entered


def _digests(calls: Sequence[Entered]) -> set[str]:
    return {note.digest for call in calls for note in call.tensors} - {""}


def note_of(tensor: torch.Tensor) -> TensorNote:
    return TensorNote(shape_of(tensor), dtype_name(tensor), digest_of(tensor))


def fp8_layers(engine: Engine) -> list[str]:
    """Layers that are meant to be in FP8, and live ones that are."""
    live = {name for name, module in engine.model.named_modules() if engine.backend.is_fp8_layer(module)}
    return sorted(plain_name(name) for name in live | set(engine.conversion.converted))
