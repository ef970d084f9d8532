"""An arm's ledger: what one instrumented step did and what stands around it, as plain data."""

from __future__ import annotations

import dis
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pytest_fp8.questions.ledger.differences import OUTSIDE
from pytest_fp8.questions.ledger.evidence import NO_UPDATES, ArmLedger, Entered, OptimizerNote, TensorNote, Updates
from pytest_fp8.worker.answers.instrumented import SEED, fit_scales_to_recorded, instrumented_step
from pytest_fp8.worker.answers.updates import updates
from pytest_fp8.worker.error_trace import code_of
from pytest_fp8.worker.notes import digest_of, optimizer_note, random_state, shape_of, switches_of
from pytest_fp8.worker.record.gradients import norm_of
from pytest_fp8.worker.record.operators import dtype_name
from pytest_fp8.worker.record.perturb import PERTURBATION, moved_weights
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.room import recorded_batch
from pytest_fp8.worker.record.tables import (
    draws_of,
    may_route,
    module_calls,
    operators_of,
    products_of,
    recomputed_otherwise,
    waits_of,
    wire_of,
    work_of,
)
from pytest_fp8.worker.tensors import plain_name, split
from pytest_fp8.worker.training.phases import around_step
from pytest_fp8.worker.training.ranks import every_rank_s
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


class StepLedger:
    """The recorder, and what stands around the step, as an observer of the instrumented step
    (:class:`pytest_fp8.worker.answers.instrumented.Observer`)."""

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
            stack.enter_context(around_step(self._engine.optimizer, self._before_step))
            # Before the step: a schedule may note the loss, which FP8 moves.
            self.optimizer = optimizer_note(self._engine.optimizer, self._engine.model, self._engine.fused_params)
            yield
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
        self.gradients = sorted({plain_name(part) for part, _ in split(live, engine.fused_params)})
        if self._norm > 0:
            self.norm_kept = self._total_norm() / self._norm

    def other_work(self, other: StepLedger) -> set[str]:
        """The modules that did other work in another record of the step."""
        one, two = work_of(self.table), work_of(other.table)
        found = {name for name in (*one, *two) if one.get(name) != two.get(name)}
        alike = (self.backward, self.stepped) == (other.backward, other.stepped)
        return found if alike else {*found, OUTSIDE}

    def _total_norm(self) -> float:
        gradients = [p.grad for p in self._engine.model.parameters() if p.grad is not None]
        # Not watched: it is no part of the step.
        with _disable_current_modes():
            return float(norm_of(gradients)) if gradients else math.nan


@dataclass(frozen=True)
class Recorded:
    """The arm's instrumented step."""

    step: StepLedger
    loss: torch.Tensor


_RECORDED: WeakKeyDictionary[Engine, Recorded] = WeakKeyDictionary()
_LEDGERS: WeakKeyDictionary[Engine, ArmLedger] = WeakKeyDictionary()


def recorded(engine: Engine) -> Recorded:
    """The arm's recorded step; it runs once, and later calls give the same."""
    if engine not in _RECORDED:
        _start_over(engine)
        step = StepLedger(engine)
        _RECORDED[engine] = Recorded(step, instrumented_step(engine, step, restart=False))
    return _RECORDED[engine]


def ledger_of(engine: Engine) -> ArmLedger:
    """The arm's ledger, of its recorded step."""
    if engine not in _LEDGERS:
        _LEDGERS[engine] = _taken(engine)
    return _LEDGERS[engine]


def _taken(engine: Engine) -> ArmLedger:
    batch = [note_of(tensor) for tensor in tensors_in(recorded_batch(engine, SEED, step=0))]
    made = _updates(engine)
    record = recorded(engine)
    seen, table = record.step, record.step.table
    routed, entered = _moved(engine, record, batch)
    return ArmLedger(
        batch=batch,
        entered=entered,
        calls=module_calls(table),
        classes={call.module: call.kind for call in table.calls},
        products=products_of(table),
        operators={owner: dict(counts) for owner, counts in operators_of(table).items()},
        waits={owner: dict(counts) for owner, counts in waits_of(table).items()},
        backward=seen.backward,
        stepped=seen.stepped,
        gradients=seen.gradients,
        norm_kept=seen.norm_kept,
        loss=float(record.loss),
        loss_dtype=dtype_name(record.loss),
        random=seen.random,
        draws=draws_of(table),
        before=engine.weights[0],
        after=engine.weights[1],
        optimizer=seen.optimizer,
        updates=made,
        switches=seen.switches,
        switches_after=seen.switches_after,
        fp8_layers=fp8_layers(engine),
        linears=[plain_name(name) for name in engine.originals],
        routed=routed,
        kept=_kept(engine.setup.own.batch) if engine.setup.own is not None else (),
        ranks=engine.case.gpus,
        wire=wire_of(table),
        watched=table.watched,
        recomputed_otherwise=recomputed_otherwise(table),
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


def _start_over(engine: Engine) -> None:
    """Restart the arm, in the modes in which its training leaves its modules: a step that ends in ``eval()`` begins
    there, too."""
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.restart(SEED)
    fit_scales_to_recorded(engine, SEED)
    for module, training in modes:
        module.training = training


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
    _start_over(engine)
    found: list[StepLedger] = []
    for draw, by in enumerate((0.0, *MOVES)):
        found.append(StepLedger(engine))
        with moved_weights(engine, draw, by, beside=seen.recorder.adopted):
            instrumented_step(engine, found[-1], restart=False)
    repeated, *moved = [_digests(each.table.entered) for each in found]
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
