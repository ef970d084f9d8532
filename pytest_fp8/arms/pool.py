"""All live arms of a session: built when first asked, shared by cases with the same reference, closed when done.

Two arms are built at the same time and stay alive together. Where one runs out of memory beside the other, or its
build says that it will, they take turns on the GPU from then on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pytest_fp8.arms.process import BUILD_SECONDS, REQUEST_SECONDS, ArmProcess, told_as_arm_error
from pytest_fp8.arms.scratch import CHECKPOINTS, new_folder, remove
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.arms.stopwatch import BUILD, Stopwatch
from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu
from pytest_fp8.recipes import SCRIPTS

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

GIB = 2.0**30
CONTEXT_BYTES = int(1.5 * GIB)
"""The CUDA context and the libraries' workspaces of one process."""
FILL = 0.92
"""Share of the GPU's memory in which two peaks fit at once."""
TIMED = ("blocks", "busy", "alone")
"""What a busy host would hold up: until then processes that were started ahead may import. A profile gives the times of
kernels, which a host does not change."""
ALONE = (*TIMED, "layers", "memory", "call")
"""What is asked while no other arm works: what is timed or weighed, the profile that gives kernels' times, and a user's
own function, which may take some."""
RECORDED = ("ledger", "numerics", "moved")
"""Steps that are recorded. On a GPU one arm after the other takes them: they are not compiled and keep products and
operands in FP32, up to 1.85 times the memory that the arms' builds told (1B on an H100)."""
IMPORT_SECONDS = 90.0
"""How long imports of processes that were started ahead may take. From a cold disk they took 30 s."""


@dataclass(frozen=True)
class Arm:
    """One arm of a pool. It is built when it is asked something and is not alive."""

    key: str
    spec: ArmSpec
    pool: ArmPool = field(repr=False)
    environment: ArmEnvironment | None = None
    """Another checkout than this session's: one side of a comparison."""

    @property
    def label(self) -> str:
        """How it is named where its time is told: ``8b-bf16``, ``8b-te-current@base``."""
        return self.spec.case.id + (f"@{self.environment.name}" if self.environment is not None else "")

    @property
    def facts(self) -> dict[str, Any]:
        """What the arm reported when it was last built: versions, sizes, seconds. Empty before its first build."""
        return self.pool.facts.get(self.key, {})

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Ask the arm and wait ``timeout`` seconds for its answer. Raises :class:`ArmError`."""
        process = self.pool.live(self)
        if operation in TIMED:
            self.pool.end_imports()
        with self.pool.stopwatch.clock(self.label, operation):
            return process.request(operation, timeout, **arguments)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run ``function(model)`` on the live model inside the arm's process and give its result. Both travel as
        pickles. A result with torch tensors in it imports torch in pytest's process."""
        from pytest_fp8.shipping import ship, unship
        from pytest_fp8.workload import require_function

        require_function("what call() was given", "function", function, ("model",))
        return unship(self.request("call", function=ship(function, "the function")))


class ArmPool:
    """All live arms of a session."""

    def __init__(self, gpu: Gpu | None, cases: Sequence[Case] = ()) -> None:
        """``gpu``: where arms on ``cuda`` run; ``None`` if the session has arms on the CPU only. ``cases``: of the
        session's tests, in their order."""
        self.gpu, self.cases = gpu, cases
        self.stopwatch = Stopwatch()
        self.cache: dict[tuple[str, str], Any] = {}
        """What arms have answered, by (arm key, what was asked): used by every case that shares the arm."""
        self.facts: dict[str, dict[str, Any]] = {}
        """What each arm said when it was last built, by its key."""
        self.deaths: MutableMapping[ArmProcess, ArmError] = WeakKeyDictionary()
        """Processes that ended by themselves, and what they ended with."""
        self.separated: list[str] = []
        """Arms that turned out not to fit the GPU beside their reference."""
        self._processes: dict[str, ArmProcess] = {}
        self._turns: set[str] = set()
        """Keys of arms that do not fit the GPU beside their partner."""
        self._too_large: dict[str, ArmError] = {}
        """Keys of arms that ran out of memory alone on the GPU, and are not built again."""
        self._pair: tuple[Arm, ...] = ()
        """The arms that are to be alive."""
        self._ahead: dict[tuple[str, int], ArmProcess] = {}
        """Processes that have imported the libraries of these and wait to become an arm, by backend and ranks."""
        self._folders: dict[tuple[str, str], Path] = {}
        """For the checkpoints of arms, by an arm's key and what it saves there: a reference shared by cases that save
        different things has several, so that none of them overwrites what another case still reads."""

    @property
    def pids(self) -> set[int]:
        """Of all arms' processes, those started ahead included."""
        return {pid for process in (*self._processes.values(), *self._ahead.values()) for pid in process.pids}

    @property
    def contexts(self) -> int:
        """How many processes use each of the arms' GPUs: one of each arm, and none of those that wait with their
        imports done."""
        return len(self._processes)

    def folder(self, arm: Arm, what: str) -> Path:
        """A private folder for one of an arm's checkpoints, kept while the pool keeps the arm."""
        if (arm.key, what) not in self._folders:
            self._folders[arm.key, what] = new_folder(CHECKPOINTS)
        return self._folders[arm.key, what]

    def is_alive(self, arm: Arm) -> bool:
        return arm.key in self._processes and self._processes[arm.key].alive

    def live(self, arm: Arm) -> ArmProcess:
        """The arm's process, built if it is not alive. Raises :class:`ArmError`."""
        if not self.is_alive(arm):
            if (dead := self._processes.pop(arm.key, None)) is not None:
                self.deaths[dead] = dead.death()
                dead.close()
            if self.takes_turns(arm):
                self.end_but()
            self._build([arm])
        return self._processes[arm.key]

    def ensure(self, reference: Arm, fp8: Arm) -> None:
        """Have both arms alive, and close all others. Where the pair does not fit the GPU together, its arms take turns
        from then on. Raises :class:`ArmError`."""
        self._pair = reference, fp8
        self.end_but(reference, fp8)
        self._forget_checkpoints({reference.key, fp8.key})
        if self.takes_turns(reference):
            self._turns.add(fp8.key)
            return
        missing = [arm for arm in (reference, fp8) if not self.is_alive(arm)]
        # Two steps at once need more memory than one beside an arm that waits.
        at_once = [missing] if len(missing) > 1 and not self.tight(*missing) else []
        for arms in [*at_once, *([arm] for arm in missing)]:
            try:
                self._build([arm for arm in arms if not self.is_alive(arm)])
            except ArmError as error:
                if error.code is not R.OUT_OF_MEMORY or fp8.spec.device != "cuda":
                    raise
                if len(arms) == 1:
                    # The one that was built stays, and answers first.
                    self.separate(reference, fp8)
                    return

    def takes_turns(self, arm: Arm) -> bool:
        """Whether this arm and its partner do not fit the GPU together, so that one is closed for the other."""
        return arm.key in self._turns

    def separate(self, reference: Arm, fp8: Arm) -> None:
        """Have these two take turns from now on."""
        self._turns |= {reference.key, fp8.key}
        self.separated.append(fp8.label)

    def renew(self, *arms: Arm) -> None:
        """Close these arms, so that their next request starts fresh processes."""
        for arm in arms:
            if (process := self._processes.pop(arm.key, None)) is not None:
                process.close()

    def end_but(self, *arms: Arm) -> bool:
        """End all arms but these; tells whether there was one."""
        others = self._processes.keys() - {arm.key for arm in arms}
        for key in others:
            self._processes.pop(key).close()
        return bool(others)

    def close(self) -> None:
        self.end_but()
        self._pair = ()
        self._start_ahead()
        self._forget_checkpoints(())

    def _forget_checkpoints(self, but: Collection[str]) -> None:
        """Delete those of all other arms."""
        for gone in [key for key in self._folders if key[0] not in but]:
            remove(self._folders.pop(gone))
            # The cached evidence of a checkpoint names its files.
            self.cache.pop(gone, None)

    # -- memory, as each arm's build said -------------------------------------------------------------------------

    def tight(self, *arms: Arm) -> bool:
        """Whether these arms' peaks do not fit the GPU at once, beside what others keep resident. Each must then give
        its cached memory back before the other works."""
        if self.gpu is None:
            return False
        others = self._processes.keys() - {arm.key for arm in arms}
        held = sum(self._said(key, "allocated") + CONTEXT_BYTES for key in others)
        peaks = sum(self._said(arm.key, "peak") + CONTEXT_BYTES for arm in arms)
        return any(map(self.takes_turns, arms)) or peaks + held > FILL * self.gpu.memory

    def _said(self, key: str, what: str) -> int:
        return int(self.facts.get(key, {}).get("memory", {}).get(what, 0))

    # -- builds ---------------------------------------------------------------------------------------------------

    def _build(self, arms: Sequence[Arm]) -> None:
        """Build these arms, all at the same time. Raises :class:`ArmError`."""
        for arm in arms:
            if arm.key in self._too_large:
                raise self._too_large[arm.key]
        started: list[tuple[Arm, ArmProcess]] = []
        try:
            for arm in arms:
                with self.stopwatch.clock(arm.label, BUILD):
                    started.append((arm, self._start_build(arm)))
            self._start_ahead()
            for arm, process in started:
                with self.stopwatch.clock(arm.label, BUILD):
                    facts = process.receive(BUILD_SECONDS)
                self._processes[arm.key] = process
                self.facts[arm.key] = facts
        except ArmError as error:
            if error.code is R.OUT_OF_MEMORY and len(arms) == 1 and not self._processes:
                self._too_large[arms[0].key] = error
            raise
        finally:
            for arm, process in started:
                if self._processes.get(arm.key) is not process:
                    process.close()

    def _start_build(self, arm: Arm) -> ArmProcess:
        process = self._ahead.pop(_kind(arm.spec.case), None) if arm.environment is None else None
        if process is None or not self._has_imported(process):
            process = self._new_process(arm.spec.case, arm.spec.device, arm.environment)
        try:
            process.start_build(replace(arm.spec, first_step=arm.facts.get("first_step", "")))
        except BaseException:
            process.close()
            raise
        return process

    def _start_ahead(self) -> None:
        """Start processes that import the libraries of the pair, whose speed is asked of fresh processes, too, and of
        the next case. Those of other libraries end."""
        # Another checkout's arm takes none, and a script is no process that waits.
        pair = [arm.spec.case for arm in self._pair if arm.environment is None]
        timed = any(case.asks("speedup") for case in pair)
        wanted = [*(pair if timed else ()), *self._next(pair)]
        kinds = {_kind(case): case for case in wanted if case.needs_gpu and case.backend not in SCRIPTS}
        for kind in self._ahead.keys() - kinds.keys():
            self._ahead.pop(kind).close()
        for kind, case in kinds.items():
            # One that cannot be started is started when it is wanted, and its own test tells why it cannot be.
            with contextlib.suppress(ArmError):
                if kind not in self._ahead:
                    self._ahead[kind] = self._new_process(case, "cuda")
                    self._ahead[kind].start_import()

    def _next(self, pair: Sequence[Case]) -> list[Case]:
        """Of the arms of the case after this pair's those that are not of the pair."""
        after = [case for before, case in pairwise(self.cases) if pair and before.id == pair[-1].id]
        alive = {case.digest() for case in pair}
        return [arm for case in after for arm in (case.reference(), case) if arm.digest() not in alive]

    def end_imports(self) -> None:
        """Wait until nothing is imported any more: that would hold up the hosts of arms that are timed."""
        for kind in [kind for kind, process in self._ahead.items() if not self._has_imported(process)]:
            del self._ahead[kind]

    def _has_imported(self, process: ArmProcess) -> bool:
        """Whether a process that was started ahead can become an arm, once it has its libraries."""
        try:
            if process.answer_due:
                with self.stopwatch.clock("processes started ahead", BUILD):
                    process.receive(IMPORT_SECONDS)
        except ArmError:
            process.close()
        return process.alive

    def _new_process(self, case: Case, device: str, environment: ArmEnvironment | None = None) -> ArmProcess:
        with told_as_arm_error(f"{case.id} on {device}"):
            if case.backend in SCRIPTS:
                from pytest_fp8.script.process import ScriptProcess

                return ScriptProcess(environment)
            return ArmProcess(case.backend, environment, self.gpu is None and device == "cpu", device, case.gpus)


def _kind(case: Case) -> tuple[str, int]:
    return case.backend, case.gpus
