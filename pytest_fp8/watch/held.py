"""Inside the script's process: holds it at the ends of its steps, and answers what pytest asks, as an arm does.

An operation is a generator, whose every ``yield`` lets the script make one step. Between two requests the script stands
still inside the hook of its optimizer. It ends where the other side is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from pytest_fp8.codes import W
from pytest_fp8.own_code import require_own_code
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.ledger.evidence import (
    NO_UPDATES,
    ArmLedger,
    ModuleCalls,
    OptimizerNote,
    TensorNote,
    Weight,
)
from pytest_fp8.watch import HOLD
from pytest_fp8.watch.judge import Training, judged
from pytest_fp8.watch.model import objects, root_modules, trained
from pytest_fp8.watch.observer import Observer, attached, guarded, living, process_told, profiled, synchronize
from pytest_fp8.watch.report import plain_training
from pytest_fp8.watch.trace import read_window
from pytest_fp8.worker.main import told
from pytest_fp8.worker.notes import optimizer_note, process_facts, switches_of, weights_of
from pytest_fp8.worker.record import clock
from pytest_fp8.worker.record.recorder import notes_of

LEAST_STEPS = 5
"""Steps before the script is held for the first time: caches are filled, and the notes of its batches are complete."""
BATCHES = 4
"""Calls of the model whose inputs are noted, from the second step on."""
LOSSES = 1000
"""Backward passes whose loss is kept."""
Steps = Generator[Any, None, Any]
"""An operation; each ``yield`` is one step of the script."""


class Held(Observer):
    """An observer that waits for requests once the script is warm."""

    def __init__(self, folder: str, address: str) -> None:
        """``address``: of pytest's socket."""
        super().__init__(folder)
        self.address = address
        self.weights: dict[str, Weight] | None = None
        self.switches: dict[str, str] = {}
        self.optimizer_notes: dict[int, OptimizerNote] = {}
        self.batch: list[TensorNote] = []
        self.calls = 0
        """Of the models, whose inputs were noted."""
        self.modes: dict[ModuleCalls, None] = {}
        """Train or eval of their modules in these."""
        self.passes: list[tuple[int, Sequence[Any]]] = []
        """Of each backward pass how often optimizers had stepped, and the losses that it began at."""
        self.training: Training | None = None
        note = guarded(self, Held.goes_backward)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def noted(tensors: Any, *arguments: Any, **named: Any) -> Any:
            if not torch.compiler.is_compiling():
                note(tensors)
            return backward(tensors, *arguments, **named)

        torch.autograd.backward = noted
        # A script that is not heard of ends with pytest all the same; what shows a hang is not the script's own signal.
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            faulthandler.register(signal.SIGUSR1, all_threads=True)

    # -- what is noted as the script begins ---------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Any) -> None:
        """Its settings are noted, and before the very first step the weights."""
        if self.weights is None:
            self.roots = [weakref.ref(root) for root in trained(root_modules(), objects([torch.optim.Optimizer]))]
            found = weights_of(self.whole())
            # The first forward pass, which comes before the notes, has changed running statistics.
            self.weights = {name: weight for name, weight in found.items() if weight.digest and not weight.buffer}
            self.switches = switches_of(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
            for root in self.models():
                self.note_inputs(root)
        self.optimizer_notes[id(optimizer)] = optimizer_note(optimizer, self.whole())

    def models(self) -> list[Any]:
        return living(self.roots)

    def whole(self) -> torch.nn.Module:
        """The script's models as one."""
        found = self.models()
        return found[0] if len(found) == 1 else torch.nn.ModuleList(found)

    def note_inputs(self, root: Any) -> None:
        """Note what enters the model in its next calls, but for a compiled one: a hook would be compiled with it."""
        if root._compiled_call_impl is not None:
            return

        def enters(_: Any, arguments: Any, named: Any) -> None:
            if not torch.compiler.is_compiling():
                note(root, (arguments, named))
            if self.calls >= BATCHES:
                handle.remove()

        note = guarded(self, Held.model_called)
        handle = root.register_forward_pre_hook(enters, with_kwargs=True)

    def model_called(self, root: Any, given: Any) -> None:
        if not torch.is_grad_enabled() or self.calls >= BATCHES:
            return
        self.calls += 1
        models = self.models()
        prefix = str(models.index(root)) if len(models) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            # A layer with a matrix is in the mode in which a conversion made it, which changes nothing.
            if all(each.dim() < 2 for each in module.parameters(recurse=False)):
                self.modes[ModuleCalls(name, "forward", (), "", module.training, 1)] = None
        notes = notes_of(given)
        # Of several models one's output enters the other, as a generator's does, and FP8 rounds it otherwise.
        self.batch += notes if len(models) == 1 else [replace(note, digest="") for note in notes]

    def goes_backward(self, tensors: Any) -> None:
        # Recomputation inside a backward pass may be one of its own.
        if torch._C._current_graph_task_id() != -1:
            return
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        kept = roots if len(self.passes) < LOSSES else ()
        self.passes.append((len(self.keys), [each.detach().clone() for each in kept if each.numel() == 1]))

    def passes_of(self, step: int) -> list[Sequence[Any]]:
        """The losses of each backward pass of a step, counted from 0."""
        first = self.boundary % self.period
        return [losses for calls, losses in self.passes if max(0, (calls - 1 - first) // self.period + 1) == step]

    # -- requests -----------------------------------------------------------------------------------------------------

    def watch(self) -> Steps:
        """Wait until the script is warm, then answer until no more requests can come."""
        while not self.warm() or self.steps < LEAST_STEPS:
            yield
        synchronize()
        with _connected(self.address) as connection:
            self.send(connection, process_told())
            while True:
                request = json.loads(connection.recv_bytes())
                answer = yield from self.answer(request["operation"], request["arguments"])
                synchronize()
                self.send(connection, {"id": request["id"], **answer})

    def send(self, connection: Connection, content: Mapping[str, Any]) -> None:
        connection.send_bytes(json.dumps(content, default=str).encode())

    def answer(self, operation: str, arguments: Mapping[str, Any]) -> Steps:
        try:
            result = getattr(self, f"tell_{operation}")(**arguments)
            return {"result": (yield from result) if isinstance(result, Generator) else result}
        except Exception as error:
            return told(error)

    def tell_describe(self) -> dict[str, Any]:
        require_own_code()
        return {
            **process_facts(),
            "parameters": sum(each.numel() for each in self.whole().parameters()),
            "compiled": self.graphs > 0,
            "own_checkpoints": False,
            "foreign_parameters": False,
        }

    def tell_park(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def tell_blocks(self, **how: int) -> Steps:
        """Of whole steps of the script: what it evaluates or saves in them counts."""
        return clock.timed_blocks(**how)

    def tell_busy(self, **how: int) -> Steps:
        if not torch.cuda.is_initialized():
            return clock.NO_STEPS
        self.require_profile()
        return (yield from clock.busy_steps(**how))

    def tell_layers(self) -> Steps:
        """One profiled step: its products and times, and what ``watch`` says of it; and several steps' busy times."""
        self.require_profile()
        with profiled(record_shapes=True) as profiler:
            yield
        evidence = {**process_told(), **self.model_told(), **self.profile_told(profiler)}
        window = read_window(evidence.pop("events"))
        self.training = judged(Training(evidence), window)
        steps = yield from self.tell_busy()
        nothing: dict[str, Any] = {name: {} for name in ("originals", "skipped", "recipes")}
        nothing |= dict.fromkeys(("converted", "live_fp8", "calls"), ())
        return to_plain(LayersEvidence(**nothing, **window.read, **steps))

    def tell_presence(self) -> Steps:
        """What ``pytest-fp8 watch`` says of the profiled step."""
        if self.training is None:
            yield from self.tell_layers()
        assert self.training is not None
        return plain_training([self.training])

    def require_profile(self) -> None:
        if refused := self.why_not_profiled():
            raise Refused(*refused)

    def tell_ledger(self) -> dict[str, Any]:
        """What entered, weights and optimizer before the first step, switches, and passes of the last step."""
        notes = list(self.optimizer_notes.values())
        groups: list[Mapping[str, str]] = []
        members: dict[str, int] = {}
        for note in notes:
            members |= {name: len(groups) + index for name, index in note.members.items()}
            groups += note.groups
        schedule = {f"{key} {number}": value for number, n in enumerate(notes) for key, value in n.schedule.items()}
        optimizer = OptimizerNote(" and ".join(note.kind for note in notes), groups, members, schedule)
        weights = self.weights or {}
        nothing: dict[str, Any] = {name: {} for name in ("classes", "operators", "waits", "switches_after")}
        nothing |= dict.fromkeys(("entered", "products", "gradients", "draws", "fp8_layers", "linears", "routed"), ())
        ledger = ArmLedger(
            **nothing,
            batch=self.batch,
            calls=[*self.modes],
            backward=len(self.passes_of(self.steps - 1)),
            stepped=self.period,
            norm_kept=0.0,
            loss=0.0,
            loss_dtype="",
            random="",
            before=weights,
            after=weights,
            optimizer=optimizer,
            updates=NO_UPDATES,
            switches=self.switches,
            watched=False,
        )
        return to_plain(ledger)  # type: ignore[no-any-return]

    def tell_memory(self) -> Steps:
        """Peaks of one step. It begins and ends with the optimizer, while gradients are there."""
        yield
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        yield
        synchronize()
        peak = torch.cuda.max_memory_allocated()
        peaks = {"peak_allocated": peak, "peak_reserved": torch.cuda.max_memory_reserved()}
        return {"resident": resident, "phases": {"step": peak}, "kinds": {}, **peaks}

    def tell_losses(self, steps: int) -> Steps:
        """The loss of each of the first steps, but for the very first: the sum of what it went backward from."""
        while self.steps <= steps:
            yield
        return [sum(float(loss) for losses in self.passes_of(step) for loss in losses) for step in range(1, steps + 1)]


def attach(module: Any, folder: str) -> Callable[..., None]:
    """Hold this process; see :func:`observer.attach`."""
    return attached(Held(folder, os.environ[HOLD]), module)


class Refused(Exception):
    """A request that this script does not allow."""

    def __init__(self, code: W, said: str) -> None:
        super().__init__(said)
        self.fp8_code = code


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Connection]:
    """The connection to pytest. The process ends with it, without what the script would do at its end."""
    try:
        with contextlib.ExitStack() as failed:
            failed.callback(os._exit, 1)
            plain = socket.socket(socket.AF_UNIX)
            plain.connect(address)
            failed.pop_all()
        with Connection(plain.detach()) as connection:
            yield connection
    except (EOFError, OSError):
        sys.stdout.flush()
        os._exit(0)
