"""Inside the script's process: finds its steps, times some, profiles one, and writes what it saw. Then it is gone.

A step is a period of the sequence of optimizers that torch's global hook reports. Timing comes first and the profile
last: after a first profile, Transformer Engine's steps are slower (121 and 128 ms a step at 1B on an H200). Whatever
fails here ends the observation, never the script.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from pytest_fp8.codes import W
from pytest_fp8.watch import FAILED, FINISHED, RUNNING, model
from pytest_fp8.worker.record import clock, trace
from pytest_fp8.worker.record.libraries import watch_transformer_engine

QUIET = 3
"""Hooks in a row without a new compiled graph before steps are timed."""
WARM_AT_MOST = 200
"""Steps; after them a script that still compiles is timed as it is."""
LONGEST_PERIOD = 2048
"""Optimizers in one step: one for each parameter where they run in the backward pass."""


FP8_WORD = re.compile(r"(mx)?fp8[\w-]*", re.IGNORECASE)


class Observer:
    """State of one process. Its methods are called by :func:`guarded` alone."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.keys: list[int] = []
        self.times: list[float] = []
        self.last: tuple[Any, ...] = ()
        self.period, self.shortest, self.boundary = 0, 1, 0
        self.optimizers: dict[int, Any] = {}
        self.roots: list[Any] = []
        self.steps = self.graphs = self.quiet = 0
        self.timed_steps = int(os.environ.get("FP8_WATCH_STEPS") or 10)
        self.needed = QUIET + self.timed_steps + 2
        """Steps of the script until its evidence is complete."""
        self.work: Iterator[None] | None = None
        """What is done between steps: it goes on at the end of each one."""
        self.over = False
        """The hook does nothing any more. It stays: torch is going through its hooks as it is called."""
        self.told: dict[str, Any] = {}

    # -- steps ----------------------------------------------------------------------------------------------------

    def optimizer_steps(self, optimizer: Any) -> None:
        """Before each call of an optimizer's ``step``."""
        if not self.optimizers:
            # A script may hide all objects from gc after its first step (gc.freeze).
            self.roots = [weakref.ref(root) for root in model.root_modules()]
            self.write(RUNNING, W.NOT_OBSERVED, "the process ended before its evidence was complete")
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = weakref.ref(optimizer)
            self.optimizer_begins(optimizer)

    def optimizer_begins(self, optimizer: Any) -> None:
        """Before an optimizer's first step."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """After each call of an optimizer's ``step``."""
        key = id(optimizer)
        # Without a new node in autograd's graph between them, two calls belong to one step: ZeRO's groups do that.
        now = (key, torch._C._autograd._get_sequence_nr())
        same = now == self.last and threading.current_thread() is threading.main_thread()
        self.last = now
        if same:
            self.times[-1] = time.perf_counter()
            return
        self.keys.append(key)
        self.times.append(time.perf_counter())
        graphs = compiled_graphs()
        self.quiet = self.quiet + 1 if graphs == self.graphs else 0
        self.graphs = graphs
        if self.period and self.keys[-1] != self.keys[-1 - self.period]:
            # What looked like a period was a part of a longer one.
            self.shortest, self.period = self.period + 1, 0
            self.drop_work()
        if not self.period and not self.find_period():
            return
        if (len(self.keys) - 1 - self.boundary) % self.period == 0:
            self.step_ended()

    def find_period(self) -> bool:
        """The shortest period that the last calls repeat three times, and the call that ends a step: the one before
        the longest pause, in which the forward and backward pass lie."""
        keys = self.keys
        for period in range(self.shortest, min(len(keys) // 3, LONGEST_PERIOD) + 1):
            if keys[-1] == keys[-1 - period] and keys[-period:] * 2 == keys[-3 * period : -period]:
                pauses = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
                first = len(keys) - 2 * period - 1
                ends = {first + n: pauses[first + n] + pauses[first + n + period] for n in range(period)}
                self.period, self.boundary = period, max(ends, key=lambda end: ends[end])
                return True
        if len(keys) > 4 * LONGEST_PERIOD:
            self.end(FAILED, W.NO_STEPS, "its optimizers are called in no order that repeats")
        return False

    def step_ended(self) -> None:
        self.steps = len(self.keys) // self.period
        if self.work is None:
            self.work = self.watch()
        next(self.work, None)

    def drop_work(self) -> None:
        """Whatever it has begun, as a profile, ends."""
        work, self.work = self.work, None
        if work is not None:
            work.close()  # type: ignore[attr-defined]

    # -- evidence -------------------------------------------------------------------------------------------------

    def warm(self) -> bool:
        return self.quiet >= QUIET - 1 or self.steps > WARM_AT_MOST

    def watch(self) -> Iterator[None]:
        """Let the script warm up, time steps, look at the model, and profile one step."""
        wanted = self.timed_steps
        while not self.warm():
            yield
        self.needed = self.steps + wanted + 1
        warm, graphs, marks = self.steps, self.graphs, [clock.mark()]
        compiled = 0
        while len(marks) <= wanted:
            yield
            compiled, graphs = compiled + (self.graphs != graphs), self.graphs
            marks.append(clock.mark())
        self.told = {
            "steps_ms": [clock.between(one, two) for one, two in pairwise(marks)],
            "warm_steps": warm,
            "compiled_while_timed": compiled,
            **memory_told(),
        }
        refused = self.why_not_profiled()
        if not refused:
            with profiled(record_shapes=True) as profiler:
                yield
            self.told |= self.profile_told(profiler)
        # Layers have the gradients of the profiled step.
        self.told |= self.model_told()
        return self.end(FINISHED, *(refused or ()))

    def model_told(self) -> dict[str, Any]:
        held = living(self.roots)
        told = model.model_told([*held, *model.root_modules(besides=held)], living(self.optimizers.values()))
        return {"optimizers_a_step": self.period, **told}

    def why_not_profiled(self) -> tuple[W, str] | None:
        if model.profiles_itself():
            return W.PROFILES_ITSELF, "the script has a profiler of its own, and a second one would empty it"
        # A profile that begins in a backward pass ends with it.
        if torch._C._current_graph_task_id() != -1:
            return W.NO_STEPS, "its optimizers step inside the backward pass, where no profile can begin"
        return None

    def profile_told(self, profiler: Any) -> dict[str, Any]:
        events = [list(vars(event).values()) for event in trace.plain_events(profiler)]
        return {"recipes": model.recipes_in_force(living(self.roots)), "events": events}

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self, state: str, code: str = "", reason: str = "") -> None:
        """Write the evidence; the rest of the run is as if nobody had watched."""
        self.over = True
        self.write(state, code, reason)
        self.told = {}

    def write(self, state: str, code: str = "", reason: str = "") -> None:
        """``code``, ``reason``: why the evidence is not complete."""
        said = {"state": state, "code": code, "reason": reason, "steps": self.steps}
        evidence = {**process_told(), **said, **self.told}
        path = os.path.join(self.folder, f"{os.getpid()}.json")
        with open(f"{path}.part", "w") as file:
            json.dump(evidence, file, default=str)
        os.replace(f"{path}.part", path)

    def process_ends(self) -> None:
        if self.keys:
            self.drop_work()
            steps = self.steps or len(self.keys)
            self.end(FAILED, W.TOO_SHORT, f"the script ended after {steps} steps of {self.needed} needed")

    def forked(self) -> None:
        """In the child of a fork, whose parent has begun to train."""
        self.over = True


@contextmanager
def profiled(**options: Any) -> Iterator[Any]:
    """A profile of what runs in the block, with Transformer Engine's products."""
    with watch_transformer_engine():
        synchronize()
        profiler = torch.profiler.profile(**options)
        profiler.start()
        try:
            yield profiler
        finally:
            synchronize()
            profiler.stop()


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def living(references: Iterable[Any]) -> list[Any]:
    return [each for each in (reference() for reference in references) if each is not None]


def attach(module: Any, folder: str) -> Callable[..., None]:
    """Watch this process. ``module``: ``torch.optim.optimizer``; gives what is called before each step of one."""
    return attached(Observer(folder), module)


def attached(observer: Observer, module: Any) -> Callable[..., None]:
    """Have the observer called after each step of an optimizer, and as the process ends or forks; gives what is to be
    called before each step."""
    kind = type(observer)
    stepped = guarded(observer, kind.optimizer_stepped)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            stepped(optimizer)

    module.register_optimizer_step_post_hook(hook)
    atexit.register(guarded(observer, kind.process_ends))
    os.register_at_fork(after_in_child=guarded(observer, kind.forked))
    return guarded(observer, kind.optimizer_steps)


def guarded(observer: Observer, method: Callable[..., None]) -> Callable[..., None]:
    """The method of the observer that raises nothing: the first exception ends the observation and is its reason."""

    def call(*arguments: Any) -> None:
        if observer.over:
            return
        try:
            method(observer, *arguments)
        except Exception as error:
            observer.over = True
            reason = f"the observer failed: {error!r}"
            for last in (observer.drop_work, partial(observer.write, FAILED, W.NOT_OBSERVED, reason)):
                with suppress(Exception):
                    last()

    return call


def process_told() -> dict[str, Any]:
    device: dict[str, Any] = {"type": "cpu", "name": "CPU", "capability": None}
    if torch.cuda.is_initialized():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {"type": "cuda", "name": found.name, "capability": [found.major, found.minor]}
    asking = {name: value for name, value in os.environ.items() if "fp8" in name.lower() or FP8_WORD.fullmatch(value)}
    return {
        "pid": os.getpid(),
        "rank": int(os.environ.get("RANK") or 0),
        "world": int(os.environ.get("WORLD_SIZE") or 1),
        "here": int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1),
        "run": os.environ.get("MASTER_PORT", "") if os.environ.get("WORLD_SIZE") else "",
        "arguments": [word[:80] for word in sys.argv[1:]],
        "torch": torch.__version__,
        "device": device,
        "environment": {name: value for name, value in asking.items() if not ours(name)},
    }


def ours(name: str) -> bool:
    """Whether a variable is this package's, or a path."""
    return name.startswith(("PYTEST_FP8_", "FP8_WATCH", "PYTHONPATH", "PATH", "PWD", "OLDPWD", "VIRTUAL_ENV", "_"))


def compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def memory_told() -> dict[str, Any]:
    """Peak memory since the script began, or since it set it back itself: it is not set back here."""
    if torch.cuda.is_initialized():
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_of": "allocated on the GPU"}
    import resource

    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "peak_of": "of the process"}
