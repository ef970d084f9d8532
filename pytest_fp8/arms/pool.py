"""All live arms of a session: built when first asked, shared by cases with the same reference, closed when done.

The pool decides which arms fit the GPU together and which must take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms import memory_plan, not_started
from pytest_fp8.arms.folders import Folders
from pytest_fp8.arms.process import BUILD_SECONDS, REQUEST_SECONDS, ArmProcess
from pytest_fp8.arms.ranks import AnyProcess, RankedProcess
from pytest_fp8.arms.residence import Residences
from pytest_fp8.arms.sequence import Seen, Sequences
from pytest_fp8.arms.spares import Spares
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.arms.stopwatch import BUILD, Stopwatch
from pytest_fp8.case import Case
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment


@dataclass(frozen=True)
class Arm:
    """One arm as a pair sees it. It is built when it is asked something and is not alive."""

    key: str
    spec: ArmSpec
    pool: ArmPool = field(repr=False)
    environment: ArmEnvironment | None = None
    """Another interpreter or checkout than this session's: one side of a comparison."""

    @property
    def label(self) -> str:
        """How it is named where its time is told: ``8b-bf16``, ``8b-te-current@base``."""
        return self.spec.case.id + (f"@{self.environment.name}" if self.environment is not None else "")

    @property
    def facts(self) -> dict[str, Any]:
        """What the arm reported when it was last built: versions, sizes, seconds. Empty before its first build."""
        return self.pool.facts_of(self)

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Ask the arm and wait ``timeout`` seconds for its answer. Raises :class:`ArmError`."""

        seen = self.pool.sequences.current()

        def ask() -> Any:
            process = self._next(seen)
            with self.pool.stopwatch.clock(self.label, operation):
                return process.request(operation, timeout, **arguments)

        return self.pool.residences.ask(self, ask)

    @contextlib.contextmanager
    def asked(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Iterator[Callable[[], Any]]:
        """Ask the arm and let it work while the block runs. The function that this gives waits for the answer; it
        raises :class:`ArmError`. For arms that are alive side by side.

        If the block ends without that call, the arm is closed: the late answer must not be read as another one's.
        """
        process = self._next(self.pool.sequences.current())
        process.send(operation, **arguments)
        received = False

        def answer() -> Any:
            nonlocal received
            received = True
            with self.pool.stopwatch.clock(self.label, operation):
                return process.receive(timeout)

        try:
            yield answer
        finally:
            if not received:
                process.close()

    def _next(self, seen: Seen | None) -> AnyProcess:
        process = self.pool.live(self)
        self.pool.sequences.note(seen, self.key, process, alone=self.pool.takes_turns(self))
        return process

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run ``function(model)`` on the live model inside the arm's process and give its result. Both travel as
        pickles. A result with torch tensors in it imports torch in pytest's process."""
        from pytest_fp8.shipping import ship, unship
        from pytest_fp8.workload import require_function

        require_function("function", function, ("model",), "what call() was given")
        return unship(self.request("call", function=ship(function, "the function")))


class ArmPool:
    """All live arms of a session."""

    def __init__(self, gpu: Gpu | None, turns: Callable[[Case, Gpu | None], bool] | None = None) -> None:
        """``gpu``: where arms on ``cuda`` run; ``None`` if the session has arms on the CPU only.
        ``turns``: whether the two arms of a case must take turns; by default an estimate of their memory."""
        self.gpu = gpu
        self.stopwatch = Stopwatch()
        self.residences = Residences(self)
        self.sequences = Sequences()
        self.cache: dict[tuple[str, str], Any] = {}
        """Evidence about a reference arm, by (arm key, what): asked once, used by every case that shares the arm."""
        self._must_take_turns = turns or memory_plan.exceed_together
        self._processes: dict[str, AnyProcess] = {}
        self._spares = Spares()
        self._soon: list[Arm] = []
        """Arms that may be built next."""
        self._turns: set[str] = set()
        """Keys of arms that do not fit the GPU beside their partner."""
        self._too_large: dict[str, ArmError] = {}
        """Keys of arms that the GPU does not hold, though they were alone on it, and what each build ended in."""
        self._failed_ahead: set[str] = set()
        """Keys of arms that failed when they were built ahead of their own test."""
        self._facts: dict[str, dict[str, Any]] = {}
        self._folders = Folders()

    @property
    def pids(self) -> set[int]:
        """Of all arms' processes, those started ahead included."""
        return {pid for process in self._processes.values() for pid in process.pids} | self._spares.pids

    def arm(self, key: str, spec: ArmSpec, environment: ArmEnvironment | None = None) -> Arm:
        return Arm(key, spec, self, environment)

    def folder(self, arm: Arm, what: str) -> Path:
        """A private folder for one of an arm's checkpoints, kept while the pool keeps the arm."""
        return self._folders.of((arm.key, what))

    def facts_of(self, arm: Arm) -> dict[str, Any]:
        return self._facts.get(arm.key, {})

    def side_by_side(self, *arms: Arm) -> bool:
        """Whether these arms can work at the same time where no time is taken and no memory: each in a process of its
        own, and on a GPU with room for steps of all of them that are looked at."""
        if self.tight(*arms, times=memory_plan.LOOKED_AT):
            return False
        return len({self.live(arm).pid for arm in arms}) == len(arms)

    def takes_turns(self, arm: Arm) -> bool:
        """Whether this arm and its partner do not fit the GPU together, so that one is closed for the other."""
        return arm.key in self._turns

    def live(self, arm: Arm) -> AnyProcess:
        """The arm's process, built if it is not alive. Raises :class:`ArmError`."""
        if arm.key in self._too_large:
            raise self._too_large[arm.key]
        if not self.is_alive(arm):
            if arm.key in self._processes:
                self.sequences.lose(self._processes.pop(arm.key))
            if self.takes_turns(arm):
                self._build_alone(arm)
            else:
                self._build([arm])
        return self._processes[arm.key]

    def is_too_large(self, arm: Arm) -> ArmError | None:
        """The error of an arm that the GPU does not hold, found out where the estimate says so; ``None`` for others."""
        if self.gpu is not None and memory_plan.peak_bytes(arm.spec.case) > self.gpu.memory:
            with contextlib.suppress(ArmError):
                self.live(arm)
        return self._too_large.get(arm.key)

    def ensure(self, reference: Arm, fp8: Arm, ahead: Sequence[Arm] = (), then: Sequence[Arm] = ()) -> None:
        """Have both arms alive, and as many of ``ahead`` as fit, all built at the same time; close every other arm.
        ``then``: the arms of the next case.

        Where the pair does not fit the GPU together, its arms take turns from then on. Raises :class:`ArmError`.
        """
        # Their processes start while this pair is built, so that no import runs while the pair is timed.
        self._soon = [*then, reference, fp8]
        small = memory_plan.small(reference.spec.case)
        # Large arms are never built ahead: there is no memory for them beside the pair.
        ahead = [arm for arm in ahead if arm.key not in {reference.key, fp8.key}] if small else []
        keep = {arm.key for arm in (reference, fp8, *ahead)}
        for key in [key for key in self._processes if key not in keep]:
            self._processes.pop(key).close()
        for gone in self._folders.keep(keep):
            # The cached evidence of a checkpoint names its files.
            self.cache.pop(gone, None)
        if reference.key in self._turns or self._must_take_turns(fp8.spec.case, self.gpu):
            self._turns |= {reference.key, fp8.key}
            return
        if not (missing := [arm for arm in (reference, fp8) if not self.is_alive(arm)]):
            return
        others = [arm for arm in ahead if not self.is_alive(arm) and arm.key not in self._failed_ahead]
        more = memory_plan.further_arms(self.gpu, missing[0].spec, self._held_by(self._processes)) - len(missing)
        try:
            if small or more >= 0:
                self._build(missing, others[: max(0, more)])
            else:
                # Two large arms warming up at once need two steps' memory; one after the other needs one.
                for arm in missing:
                    self._build([arm])
        except ArmError as error:
            if error.kind != "out of memory" or fp8.spec.device != "cuda":
                raise
            # The one that was built stays, and answers first.
            self.renew(*ahead)
            self._turns |= {reference.key, fp8.key}

    def renew(self, *arms: Arm) -> None:
        """Close these arms, so that their next request starts fresh processes."""
        for arm in arms:
            if (process := self._processes.pop(arm.key, None)) is not None:
                process.close()

    def close_all(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def close(self) -> None:
        self.close_all()
        self._spares.close()
        self._folders.keep(())

    def is_alive(self, arm: Arm) -> bool:
        return arm.key in self._processes and self._processes[arm.key].alive

    def _build_alone(self, arm: Arm) -> None:
        self.close_all()
        try:
            self._build([arm])
        except ArmError as error:
            if self.gpu is None:
                raise
            found = memory_plan.too_large(error, arm.spec.case, self.gpu)
            if found.kind == memory_plan.TOO_LARGE:
                self._too_large[arm.key] = found
            raise found from None

    def _build(self, arms: list[Arm], ahead: Iterable[Arm] = ()) -> None:
        """Build ``arms`` and those of ``ahead``, all at the same time. Raises :class:`ArmError` where one of ``arms``
        fails. One of ``ahead`` that fails is built again for its own test, which then reports the error."""
        optional = {arm.key for arm in ahead}
        started: list[tuple[Arm, AnyProcess]] = []
        try:
            for arm in [*arms, *ahead]:
                forgiven = [ArmError] if arm.key in optional else []
                with self.stopwatch.clock(arm.label, BUILD), contextlib.suppress(*forgiven):
                    process = self._start(arm)
                    started.append((arm, process))
                    known = self._facts.get(arm.key, {}).get("first_step", "")
                    process.start_build(replace(arm.spec, first_step=known))
            # Another interpreter's or checkout's arm has no spare.
            self._spares.start([arm.spec for arm in self._soon if arm.environment is None], self._new_process)
            for arm, process in started:
                try:
                    with self.stopwatch.clock(arm.label, BUILD):
                        self._facts[arm.key] = process.receive(BUILD_SECONDS)
                    self._processes[arm.key] = process
                    self.stopwatch.built(arm.label, self._facts[arm.key].get("seconds", {}))
                except ArmError:
                    if arm.key not in optional:
                        raise
                    self._failed_ahead.add(arm.key)
        finally:
            for arm, process in started:
                if self._processes.get(arm.key) is not process:
                    process.close()

    def _start(self, arm: Arm) -> AnyProcess:
        spare = self._spares.take(arm.spec) if arm.environment is None else None
        return spare or self._new_process(arm.spec, arm.environment)

    def _new_process(self, spec: ArmSpec, environment: ArmEnvironment | None = None) -> AnyProcess:
        how = spec.case.backend, environment, self.gpu is None and spec.device == "cpu"
        with not_started.told_as_arm_error(spec.name):
            return ArmProcess(*how) if spec.case.gpus == 1 else RankedProcess(spec.case.gpus, *how, spec.device)

    def tight(self, *arms: Arm, times: float = 1.0) -> bool:
        """Whether these arms' peaks, so many ``times``, do not fit the GPU at once, beside what others keep resident.
        Each must then give its cached memory back before the other works."""
        if any(self.takes_turns(arm) for arm in arms):
            return True
        if self.gpu is None:
            return False
        peaks = [arm.facts.get("memory", {}).get("peak", 0) + memory_plan.CONTEXT_BYTES for arm in arms]
        others = set(self._processes) - {arm.key for arm in arms}
        return bool(times * sum(peaks) + self._held_by(others) > memory_plan.FILL * self.gpu.memory)

    def _held_by(self, keys: Iterable[str]) -> int:
        """Bytes that these arms hold between their steps, as they reported when they were built."""
        held = (self._facts.get(key, {}).get("memory", {}).get("allocated", 0) for key in keys)
        return sum(int(allocated) + memory_plan.CONTEXT_BYTES for allocated in held)
