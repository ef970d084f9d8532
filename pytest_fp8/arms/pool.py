"""All live arms of a session: built when first asked, shared by cases with the same reference, closed when done.

The pool decides which arms fit the GPU together and which must take turns.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.memory_plan import CONTEXT_BYTES, FILL, resident_bytes, step_bytes
from pytest_fp8.arms.process import BUILD_SECONDS, REQUEST_SECONDS, ArmProcess
from pytest_fp8.arms.ranks import AnyProcess, RankedProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import OWN
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu
from pytest_fp8.zoo.shapes import SHAPES

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

MOST_SPARES = 2
"""Processes started ahead: one for BF16 and one for FP8, as a fresh pair needs. Each keeps its imported libraries in
memory while it waits."""


@dataclass(frozen=True)
class Arm:
    """One arm as a pair sees it. It is built when it is asked something and is not alive."""

    key: str
    spec: ArmSpec
    pool: ArmPool = field(repr=False)
    environment: ArmEnvironment | None = None
    """Another interpreter or checkout than this session's: one side of a comparison."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the arm reported when it was last built: versions, sizes, seconds. Empty before its first build."""
        return self.pool.facts_of(self)

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Ask the arm and wait ``timeout`` seconds for its answer. Raises :class:`ArmError`."""
        process = self.pool.live(self)
        with self.pool.clock(operation):
            return process.request(operation, timeout, **arguments)

    @contextlib.contextmanager
    def asked(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Iterator[Callable[[], Any]]:
        """Ask the arm and let it work while the block runs. The function that this gives waits for the answer; it
        raises :class:`ArmError`.

        If the block ends without that call, the arm is closed: the late answer must not be read as another one's.
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
        """Run ``function(model)`` on the live model inside the arm's process and give its result.

        Function and result travel as pickles. A result with torch tensors in it imports torch in pytest's process.
        """
        from pytest_fp8.shipping import ship, unship

        return unship(self.request("call", function=ship(function, "the function")))


class ArmPool:
    """All live arms of a session."""

    def __init__(self, gpu: Gpu | None) -> None:
        """``gpu``: where arms on ``cuda`` run; ``None`` if the session has arms on the CPU only."""
        self.gpu = gpu
        self.seconds: dict[str, float] = {}
        """Time spent waiting for arms, by operation."""
        self.cache: dict[tuple[str, str], Any] = {}
        """Evidence about a reference arm, by (arm key, what): asked once, used by every case that shares the arm."""
        self._processes: dict[str, AnyProcess] = {}
        self._spares: dict[str, ArmProcess] = {}
        """Processes started ahead, by the backend whose library they have imported."""
        self._soon: list[Arm] = []
        """Arms that may be built next."""
        self._turns: set[str] = set()
        """Keys of arms that do not fit the GPU beside their partner."""
        self._failed_ahead: set[str] = set()
        """Keys of arms that failed when they were built ahead of their own test."""
        self._facts: dict[str, dict[str, Any]] = {}
        self._folders: dict[tuple[str, str], tempfile.TemporaryDirectory[str]] = {}

    @property
    def pids(self) -> set[int]:
        """Of all arms' processes, those started ahead included."""
        return {pid for process in [*self._processes.values(), *self._spares.values()] for pid in process.pids}

    def arm(self, key: str, spec: ArmSpec, environment: ArmEnvironment | None = None) -> Arm:
        return Arm(key, spec, self, environment)

    def folder(self, arm: Arm, what: str) -> Path:
        """A private folder for one of an arm's checkpoints, kept while the pool keeps the arm.

        A reference shared by cases that save different things has several folders, so that none of them overwrites
        what another case still reads.
        """
        key = (arm.key, what)
        if key not in self._folders:
            self._folders[key] = tempfile.TemporaryDirectory(prefix="fp8-checkpoints-")
        return Path(self._folders[key].name)

    def facts_of(self, arm: Arm) -> dict[str, Any]:
        return self._facts.get(arm.key, {})

    def side_by_side(self, *arms: Arm) -> bool:
        """Whether these arms can work at the same time: on a CPU, each in a process of its own. On a GPU, each would
        change the other's measured memory and speed."""
        on_cpu = all(arm.spec.device == "cpu" for arm in arms)
        return on_cpu and len({self.live(arm).pid for arm in arms}) == len(arms)

    def takes_turns(self, arm: Arm) -> bool:
        """Whether this arm and its partner do not fit the GPU together, so that one is closed for the other."""
        return arm.key in self._turns

    def live(self, arm: Arm) -> AnyProcess:
        """The arm's process, built if it is not alive. Raises :class:`ArmError`."""
        if self._is_alive(arm):
            return self._processes[arm.key]
        if arm.key in self._turns:
            self.close_all()
        self._processes.pop(arm.key, None)
        self._build([arm])
        return self._processes[arm.key]

    def ensure(self, reference: Arm, fp8: Arm, ahead: Iterable[Arm] = ()) -> None:
        """Have both arms alive, and as many of ``ahead`` as fit, all built at the same time; close every other arm.

        Where the pair does not fit the GPU together, its arms take turns from then on. Raises :class:`ArmError`.
        """
        pair = [reference, fp8]
        # Their processes start while this pair is built, so that no import runs while the pair is timed.
        self._soon = [reference, *(arm for arm in ahead if arm.key != fp8.key), fp8]
        # Large arms are never built ahead: there is no memory for them beside the pair.
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
        others = [arm for arm in later if not self._is_alive(arm) and arm.key not in self._failed_ahead]
        more = self._further_arms_that_fit(missing)
        try:
            if self._small(reference) or more >= 0:
                self._build(missing, others[: max(0, more)])
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
        """Close these arms, so that their next request starts fresh processes."""
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
    def clock(self, what: str) -> Iterator[None]:
        """Add the time spent in the block to :attr:`seconds`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - start

    def _is_alive(self, arm: Arm) -> bool:
        return arm.key in self._processes and self._processes[arm.key].alive

    def _build(self, arms: list[Arm], ahead: Iterable[Arm] = ()) -> None:
        """Build ``arms`` and those of ``ahead``, all at the same time. Raises :class:`ArmError` where one of ``arms``
        fails. One of ``ahead`` that fails is built again for its own test, which then reports the error."""
        optional = {arm.key for arm in ahead}
        started: list[tuple[Arm, AnyProcess]] = []
        try:
            with self.clock("build"):
                for arm in [*arms, *ahead]:
                    process = self._start(arm)
                    started.append((arm, process))
                    known = self._facts.get(arm.key, {}).get("first_step", "")
                    process.start_build(replace(arm.spec, first_step=known))
                self._start_spares()
                for arm, process in started:
                    try:
                        self._facts[arm.key] = process.receive(BUILD_SECONDS)
                        self._processes[arm.key] = process
                    except ArmError:
                        if arm.key not in optional:
                            raise
                        self._failed_ahead.add(arm.key)
        finally:
            for arm, process in started:
                if self._processes.get(arm.key) is not process:
                    process.close()

    def _start_spares(self) -> None:
        """Start processes for the arms on a GPU that may be built next, so that their imports delay nothing later."""
        for arm in self._soon:
            backend = arm.spec.case.backend
            usable = arm.spec.device == "cuda" and arm.environment is None and arm.spec.case.gpus == 1
            if usable and backend not in self._spares and len(self._spares) < MOST_SPARES:
                self._spares[backend] = ArmProcess(backend)

    def _start(self, arm: Arm) -> AnyProcess:
        backend = arm.spec.case.backend
        fork = self.gpu is None and arm.spec.device == "cpu"
        if arm.spec.case.gpus > 1:
            return RankedProcess(arm.spec.case.gpus, backend, arm.environment, fork)
        if arm.environment is not None:
            return ArmProcess(backend, arm.environment)
        spare = self._spares.pop(backend, None)
        if spare is not None:
            if spare.alive:
                return spare
            spare.close()
        return ArmProcess(backend, fork=fork)

    def _further_arms_that_fit(self, building: list[Arm]) -> int:
        """How many arms of the same model can warm up at the same time as these, beside those already resident.

        Negative where not even these fit at once, or where there is no estimate: on a CPU, on several GPUs and for user
        models.
        """
        first = building[0].spec
        if self.gpu is None or first.device != "cuda" or first.case.model == OWN or first.case.gpus > 1:
            return -1
        free = FILL * self.gpu.memory - self._held_by(self._processes)
        return int(free // (resident_bytes(first.case) + step_bytes(first.case))) - len(building)

    def tight(self, *arms: Arm) -> bool:
        """Whether these arms' peaks do not fit the GPU at once, beside what other arms keep resident. Each must then
        give its cached memory back before the other works."""
        if self.gpu is None:
            return False
        peaks = [arm.facts.get("memory", {}).get("peak", 0) + CONTEXT_BYTES for arm in arms]
        others = set(self._processes) - {arm.key for arm in arms}
        return bool(sum(peaks) + self._held_by(others) > FILL * self.gpu.memory)

    def _held_by(self, keys: Iterable[str]) -> int:
        """Bytes that these arms hold between their steps, as they reported when they were built."""
        held = (self._facts.get(key, {}).get("memory", {}).get("allocated", 0) for key in keys)
        return sum(int(allocated) + CONTEXT_BYTES for allocated in held)

    def _small(self, arm: Arm) -> bool:
        """Whether several such arms can warm up at the same time on any GPU with FP8."""
        model = arm.spec.case.model
        return arm.spec.device == "cpu" or (model != OWN and SHAPES[model].parameters < 2e9)
