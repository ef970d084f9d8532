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

from pytest_fp8.codes import W

HOLD = "PYTEST_FP8_HOLD"
"""The variable that names the socket of a pytest that holds the script; without it the script is watched alone."""
FINISHED, RUNNING, FAILED = "finished", "running", "failed"
QUIET = 3
"""Hooks in a row without a new compiled graph before steps are timed."""
WARM_AT_MOST = 200
"""Steps; after them a script that still compiles is timed as it is."""
SECONDS = 60.0
"""What timing takes at most, once five steps are timed."""
LONGEST_PERIOD = 2048
"""Optimizers in one step: one for each parameter where they run in the backward pass."""


FP8_WORD = re.compile(r"(mx)?fp8[\w-]*", re.IGNORECASE)


class Observer:
    """State of one process. Its methods are called by :func:`guarded` alone."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.main = threading.get_ident()
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

    def optimizer_stepped(self, optimizer: Any) -> None:
        """The hook: the end of one call of an optimizer's ``step``."""
        import torch

        key = id(optimizer)
        # Without a new node in autograd's graph between them, two calls belong to one step: ZeRO's groups do that.
        now = (key, torch._C._autograd._get_sequence_nr())
        same = now == self.last and threading.get_ident() == self.main
        self.last = now
        if same:
            self.times[-1] = time.perf_counter()
            return
        if key not in self.optimizers:
            self.optimizers[key] = weakref.ref(optimizer)
        if not self.keys:
            self.first_step()
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

    def first_step(self) -> None:
        from pytest_fp8.watch.model import root_modules

        # A script may hide all objects from gc after its first step (gc.freeze).
        self.roots = [weakref.ref(root) for root in root_modules()]
        self.write(RUNNING, W.NOT_OBSERVED, "the process ended before its evidence was complete")

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
        from pytest_fp8.worker.record.clock import between, mark

        wanted = self.timed_steps
        while not self.warm():
            yield
        self.needed = self.steps + wanted + 1
        warm, began, graphs, marks = self.steps, time.perf_counter(), self.graphs, [mark()]
        compiled = 0
        while len(marks) <= wanted and not (len(marks) > 5 and time.perf_counter() - began > SECONDS):
            yield
            compiled, graphs = compiled + (self.graphs != graphs), self.graphs
            marks.append(mark())
        self.told = {
            "steps_ms": [between(one, two) for one, two in pairwise(marks)],
            "warm_steps": warm,
            "compiled_while_timed": compiled,
            "optimizers_a_step": self.period,
            **memory_told(),
            **self.model_told(),
        }
        if refused := self.why_not_profiled():
            return self.end(FINISHED, *refused)
        with profiled(record_shapes=True) as profiler:
            yield
        self.told |= self.profile_told(profiler)
        return self.end(FINISHED)

    def model_told(self) -> dict[str, Any]:
        from pytest_fp8.watch.model import model_told, root_modules

        held = living(self.roots)
        return model_told([*held, *root_modules(besides=held)], living(self.optimizers.values()))

    def why_not_profiled(self) -> tuple[W, str] | None:
        import torch

        from pytest_fp8.watch.model import profiles_itself

        if profiles_itself():
            return W.PROFILES_ITSELF, "the script has a profiler of its own, and a second one would empty it"
        # A profile that begins in a backward pass ends with it.
        if torch._C._current_graph_task_id() != -1:
            return W.NO_STEPS, "its optimizers step inside the backward pass, where no profile can begin"
        return None

    def profile_told(self, profiler: Any) -> dict[str, Any]:
        from pytest_fp8.watch.model import recipes_in_force
        from pytest_fp8.worker.record.trace import plain_events

        events = [list(vars(event).values()) for event in plain_events(profiler)]
        return {"recipes": recipes_in_force(living(self.roots)), "events": events}

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self, state: str, code: str = "", reason: str = "") -> None:
        """Write the evidence; the rest of the run is as if nobody had watched."""
        self.over = True
        self.write(state, code, reason)
        self.told = {}

    def write(self, state: str, code: str = "", reason: str = "") -> None:
        """``code``, ``reason``: why the evidence is not complete."""
        said = {"state": state, "code": code, "reason": reason, "steps": self.steps}
        evidence = {**process_told(self.pid), **said, **self.told}
        path = os.path.join(self.folder, f"{self.pid}.json")
        with open(f"{path}.part", "w") as file:
            json.dump(evidence, file, default=str)
        os.replace(f"{path}.part", path)

    def process_ends(self) -> None:
        if self.keys:
            self.drop_work()
            steps = self.steps or len(self.keys)
            self.end(FAILED, W.TOO_SHORT, f"the script ended after {steps} steps of {self.needed} needed")

    def forked(self) -> None:
        """In the child of a fork: silent where the parent had begun to train, anew where it had not."""
        if self.keys:
            self.over = True
        self.pid, self.main = os.getpid(), threading.get_ident()


@contextmanager
def profiled(**options: Any) -> Iterator[Any]:
    """A profile of what runs in the block, with Transformer Engine's products."""
    import torch

    from pytest_fp8.worker.record.libraries import watch_transformer_engine

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
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def living(references: Iterable[Any]) -> list[Any]:
    return [each for each in (reference() for reference in references) if each is not None]


def attach(observer: Observer, module: Any) -> None:
    """Have the observer called after each step of an optimizer, and as the process ends or forks."""
    import torch

    step = guarded(observer, type(observer).optimizer_stepped)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        # Traced into a compiled step, the rest would break its graph.
        if not torch.compiler.is_compiling():
            step(optimizer)

    module.register_optimizer_step_post_hook(hook)
    atexit.register(guarded(observer, type(observer).process_ends))
    os.register_at_fork(after_in_child=guarded(observer, type(observer).forked))


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


def process_told(pid: int) -> dict[str, Any]:
    import torch

    device: dict[str, Any] = {"type": "cpu", "name": "CPU", "capability": None}
    if torch.cuda.is_initialized():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {"type": "cuda", "name": found.name, "capability": [found.major, found.minor]}
    asking = {name: value for name, value in os.environ.items() if "fp8" in name.lower() or FP8_WORD.fullmatch(value)}
    return {
        "pid": pid,
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
    import torch

    if torch.cuda.is_initialized():
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_of": "allocated on the GPU"}
    import resource

    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "peak_of": "of the process"}
