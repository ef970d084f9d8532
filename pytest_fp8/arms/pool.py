"""The arms that are alive in this session: built when first asked, shared where two cases have the same reference,
closed when their turn is over. Knows what fits the GPU together and what must take turns."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.memory_plan import CONTEXT_BYTES, FILL, resident_bytes, step_bytes
from pytest_fp8.arms.process import BUILD_SECONDS, REQUEST_SECONDS, ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import OWN
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu
from pytest_fp8.zoo.shapes import SHAPES

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment
    from pytest_fp8.arms.forked import Template

MOST_SPARES = 2
"""One for BF16 and one for FP8, which is what a fresh pair takes; each holds its imported libraries while it waits."""


@dataclass
class Arm:
    """One arm as a pair sees it: alive when it is asked something, whatever the pool has done meanwhile."""

    key: str
    spec: ArmSpec
    pool: ArmPool = field(repr=False)
    environment: ArmEnvironment | None = None
    """Another interpreter or checkout than this session's, in a same-job comparison."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the arm said of itself when it was last built: versions, sizes, seconds."""
        return self.pool.facts_of(self)

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Ask the live arm; it is built first if it is not alive. Raises :class:`ArmError`."""
        process = self.pool.live(self)
        with self.pool.clock(operation):
            return process.request(operation, timeout, **arguments)

    @contextlib.contextmanager
    def asked(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Iterator[Callable[[], Any]]:
        """The arm works on its answer while the block runs; what this gives waits for it. Raises :class:`ArmError`.

        An arm that is left before it answered is closed: the answer belongs to no later question.
        """
        process = self.pool.live(self)
        process.send(operation, **arguments)
        received = False

        def answer() -> Any:
            nonlocal received
            received = True
            with self.pool.clock(operation):
                return process.receive(timeout)

        try:
            yield answer
        finally:
            if not received:
                process.close()

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run ``function(model)`` on the live model inside the arm's process; gives its result.

        Both travel by pickle over the pipe, so the result must be picklable; torch tensors in it import torch here.
        """
        from pytest_fp8.shipping import ship, unship

        return unship(self.request("call", function=ship(function, "the function")))


class ArmPool:
    """All live arms of a session."""

    def __init__(self, gpu: Gpu | None, log_folder: Path | None = None, template: Template | None = None) -> None:
        """``template``: what CPU arms are forked from. A session with a GPU has none: no process that has used CUDA can
        be forked, and beside a GPU nothing is to be gained."""
        self.gpu = gpu
        self.template = template
        self.seconds: dict[str, float] = {}
        self.cache: dict[tuple[str, str], Any] = {}
        """Evidence about a reference arm, by (arm key, what): asked once, used by every case that shares the arm."""
        self._log_folder = log_folder
        self._processes: dict[str, ArmProcess] = {}
        self._spares: dict[str, ArmProcess] = {}
        """Processes started before they are wanted, by the backend whose library they have imported."""
        self._soon: list[Arm] = []
        self._turns: set[str] = set()
        self._refused: set[str] = set()
        """Arms that failed when they were built ahead of their turn."""
        self._facts: dict[str, dict[str, Any]] = {}
        self._folders: dict[tuple[str, str], tempfile.TemporaryDirectory[str]] = {}

    @property
    def pids(self) -> set[int]:
        """Of all processes that are ours, those included that wait for their turn with a library already imported."""
        return {process.pid for process in [*self._processes.values(), *self._spares.values()]}

    def arm(self, key: str, spec: ArmSpec, environment: ArmEnvironment | None = None) -> Arm:
        return Arm(key, spec, self, environment)

    def folder(self, arm: Arm, what: str) -> Path:
        """A private folder for one of an arm's checkpoints, kept while the arm is wanted. A reference shared by cases
        that save different things has several, and none overwrites what another case still reads."""
        key = (arm.key, what)
        if key not in self._folders:
            self._folders[key] = tempfile.TemporaryDirectory(prefix="fp8-checkpoints-")
        return Path(self._folders[key].name)

    def facts_of(self, arm: Arm) -> dict[str, Any]:
        return self._facts.get(arm.key, {})

    def side_by_side(self, *arms: Arm) -> bool:
        """Whether these arms can work at the same time: on a CPU, each in a process of its own. On a GPU they would
        change what is read of each other's memory and speed."""
        on_cpu = all(arm.spec.device == "cpu" for arm in arms)
        return on_cpu and len({self.live(arm).pid for arm in arms}) == len(arms)

    def takes_turns(self, arm: Arm) -> bool:
        """Whether this arm and its partner do not fit the GPU together."""
        return arm.key in self._turns

    def live(self, arm: Arm) -> ArmProcess:
        """The arm's process, built if need be."""
        if self._is_alive(arm):
            return self._processes[arm.key]
        if arm.key in self._turns:
            self.close_all()
        self._processes.pop(arm.key, None)
        self._build([arm])
        return self._processes[arm.key]

    def ensure(self, reference: Arm, fp8: Arm, ahead: Iterable[Arm] = ()) -> None:
        """Have both arms alive, and as many of ``ahead`` as fit, built at the same time; close all others.

        Where the pair does not fit the GPU together, its arms take turns from then on.
        """
        pair = [reference, fp8]
        # Their imports take place while this pair is built, never while it is timed.
        self._soon = [reference, *(arm for arm in ahead if arm.key != fp8.key), fp8]
        # Large arms never wait for their turn on the GPU: there is no room beside the pair.
        later = [arm for arm in ahead if arm.key not in {reference.key, fp8.key}] if self._small(reference) else []
        keep = {arm.key for arm in pair + later}
        for key in [key for key in self._processes if key not in keep]:
            self._processes.pop(key).close()
        for gone in [key for key in self._folders if key[0] not in keep]:
            # The cached evidence of a checkpoint names its files.
            self._folders.pop(gone).cleanup()
            self.cache.pop(gone, None)
        if fp8.key in self._turns:
            return
        missing = [arm for arm in pair if not self._is_alive(arm)]
        if not missing:
            return
        others = [arm for arm in later if not self._is_alive(arm) and arm.key not in self._refused]
        room = self._room_beside(missing)
        try:
            if self._small(reference) or room >= 0:
                self._build(missing, others[: max(0, room)])
            else:
                # Two large arms warming up at once need two steps' memory; one after the other needs one.
                for arm in missing:
                    self._build([arm])
        except ArmError as error:
            if error.kind != "out of memory" or fp8.spec.device != "cuda":
                raise
            self.close_all()
            self._turns |= {reference.key, fp8.key}

    def renew(self, *arms: Arm) -> None:
        """Close these arms, so that the next question finds fresh processes."""
        for arm in arms:
            process = self._processes.pop(arm.key, None)
            if process is not None:
                process.close()

    def close_all(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def close(self) -> None:
        self.close_all()
        for spare in self._spares.values():
            spare.close()
        self._spares.clear()
        for folder in self._folders.values():
            folder.cleanup()
        self._folders.clear()

    @contextlib.contextmanager
    def clock(self, what: str) -> Any:
        """Adds the time spent inside to :attr:`seconds`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start

    def _is_alive(self, arm: Arm) -> bool:
        return arm.key in self._processes and self._processes[arm.key].alive

    def _build(self, arms: list[Arm], ahead: Iterable[Arm] = ()) -> None:
        """Build ``arms``, and beside them those of ``ahead``. One of these that fails is left for its own turn, when
        its own test reports it."""
        optional = {arm.key for arm in ahead}
        started: list[tuple[Arm, ArmProcess]] = []
        try:
            with self.clock("build"):
                for arm in [*arms, *ahead]:
                    process = self._start(arm)
                    started.append((arm, process))
                    process.start_build(arm.spec)
                self._expect(self._soon)
                for arm, process in started:
                    try:
                        self._facts[arm.key] = {**process.receive(BUILD_SECONDS), "not forked": process.not_forked}
                        self._processes[arm.key] = process
                    except ArmError:
                        if arm.key not in optional:
                            raise
                        self._refused.add(arm.key)
        finally:
            for arm, process in started:
                if self._processes.get(arm.key) is not process:
                    process.close()

    def _expect(self, arms: Iterable[Arm]) -> None:
        """Start processes for the backends of arms that may be built next, so that their imports take no turn."""
        for arm in arms:
            backend = arm.spec.case.backend
            elsewhere = arm.spec.device != "cuda" or arm.environment is not None
            if not elsewhere and backend not in self._spares and len(self._spares) < MOST_SPARES:
                self._spares[backend] = ArmProcess(backend, self._log_folder)

    def _start(self, arm: Arm) -> ArmProcess:
        backend = arm.spec.case.backend
        if arm.environment is not None:
            return ArmProcess(backend, self._log_folder, arm.environment)
        spare = self._spares.pop(backend, None)
        if spare is not None:
            if spare.alive:
                return spare
            spare.close()
        return ArmProcess(backend, self._log_folder, template=self.template if arm.spec.device == "cpu" else None)

    def _room_beside(self, building: list[Arm]) -> int:
        """How many further arms of the same model can warm up at the same time as these, beside those that are already
        resident. Negative: these alone do not fit at once, or nobody knows what they take."""
        first = building[0].spec
        if self.gpu is None or first.device != "cuda" or first.case.model == OWN:
            return -1
        free = FILL * self.gpu.memory - self._held_by(self._processes)
        return int(free // (resident_bytes(first.case) + step_bytes(first.case))) - len(building)

    def tight(self, *arms: Arm) -> bool:
        """Whether these arms' peaks do not fit the GPU at once, beside what other arms keep resident: then each must
        give its cached memory back before the other's turn."""
        if self.gpu is None:
            return False
        told = [arm.facts.get("memory", {}).get("peak", 0) + CONTEXT_BYTES for arm in arms]
        others = set(self._processes) - {arm.key for arm in arms}
        return bool(sum(told) + self._held_by(others) > FILL * self.gpu.memory)

    def _held_by(self, keys: Iterable[str]) -> int:
        """Bytes of live arms between their steps, as they said when they were built."""
        held = (self._facts.get(key, {}).get("memory", {}).get("allocated", 0) for key in keys)
        return sum(int(allocated) + CONTEXT_BYTES for allocated in held)

    def _small(self, arm: Arm) -> bool:
        """Whether several such arms can warm up side by side on any GPU with FP8."""
        model = arm.spec.case.model
        return arm.spec.device == "cpu" or (model != OWN and SHAPES[model].parameters < 2e9)


def cpu_threads() -> int:
    """All cores this process may use, at most 8: tiny models gain nothing from more."""
    return min(8, len(os.sched_getaffinity(0)))
