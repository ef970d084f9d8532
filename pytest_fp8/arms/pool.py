"""All live arms of a session: built when first asked, shared by cases with the same reference, closed when done.

The pool decides which arms fit the GPU together and which must take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms import memory_plan
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.process import BUILD_SECONDS, ArmProcess, told_as_arm_error
from pytest_fp8.arms.residence import Residences
from pytest_fp8.arms.room import Room
from pytest_fp8.arms.scratch import Folders
from pytest_fp8.arms.sequence import Sequences
from pytest_fp8.arms.spares import Spares
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.arms.stopwatch import AHEAD, BUILD, Stopwatch
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment


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
        self._processes: dict[str, ArmProcess] = {}
        self.spares = Spares()
        self._soon: list[Arm] = []
        """Arms that may be built next."""
        self._turns: set[str] = set()
        """Keys of arms that do not fit the GPU beside their partner."""
        self.separated: list[str] = []
        """Arms that turned out not to fit the GPU beside their reference."""
        self._by_themselves: set[str] = set()
        """Keys of arms that ran out of memory beside arms of others."""
        self._too_large: dict[str, ArmError] = {}
        """Keys of arms that the GPU does not hold, though they were alone on it, and what each build ended in."""
        self._facts: dict[str, dict[str, Any]] = {}
        self._room = Room(gpu, self._facts)
        self._folders = Folders()

    @property
    def pids(self) -> set[int]:
        """Of all arms' processes, those started ahead included."""
        live = {pid for process in self._processes.values() for pid in process.pids}
        return live | self.spares.pids

    @property
    def contexts(self) -> int:
        """How many processes use each of the arms' GPUs: one of each arm, and none of those that wait with their
        imports done."""
        return len(self._processes)

    def arm(self, key: str, spec: ArmSpec, environment: ArmEnvironment | None = None) -> Arm:
        return Arm(key, spec, self, environment)

    def folder(self, arm: Arm, what: str) -> Path:
        """A private folder for one of an arm's checkpoints, kept while the pool keeps the arm."""
        return self._folders.of((arm.key, what))

    def facts_of(self, arm: Arm) -> dict[str, Any]:
        return self._facts.get(arm.key, {})

    def side_by_side(self, *arms: Arm) -> bool:
        """Whether these arms can work at the same time where no time is taken and no memory: each in a process of its
        own, and on a GPU with room for steps of all of them, of users' models also for those that are looked at."""
        if self.tight(*arms, looked_at=any(arm.spec.case.model == OWN for arm in arms)):
            return False
        return len({self.live(arm).pid for arm in arms}) == len(arms)

    def takes_turns(self, arm: Arm) -> bool:
        """Whether this arm and its partner do not fit the GPU together, so that one is closed for the other."""
        return arm.key in self._turns

    def live(self, arm: Arm) -> ArmProcess:
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

    def ensure(self, reference: Arm, fp8: Arm, then: Sequence[Arm] = ()) -> None:
        """Have both arms alive, and close all others. ``then``: the arms of the next case, for which processes start
        while this pair is built. What is timed waits until they have their libraries.

        Where the pair does not fit the GPU together, its arms take turns from then on. Raises :class:`ArmError`.
        """
        self._soon = [*then, reference, fp8]
        pair = (reference, fp8)
        keep = {arm.key for arm in pair}
        self._end_but(keep)
        for gone in self._folders.keep(keep):
            # The cached evidence of a checkpoint names its files.
            self.cache.pop(gone, None)
        if reference.key in self._turns or self._must_take_turns(fp8.spec.case, self.gpu):
            self._turns |= keep
            return
        try:
            self._have_both(pair)
            if self._room.crowded(pair):
                # The reference stays, and answers first.
                self._separate(reference, fp8)
                self.renew(fp8)
        except ArmError as error:
            if error.code is not R.OUT_OF_MEMORY or fp8.spec.device != "cuda":
                raise
            # The one that was built stays, and answers first.
            self._separate(reference, fp8)

    def _end_but(self, keep: set[str]) -> None:
        """End all arms but those of these keys."""
        for key in [key for key in self._processes if key not in keep]:
            self._processes.pop(key).close()

    def _have_both(self, pair: Sequence[Arm]) -> None:
        """Build what is missing of these two at once. Two steps at once need more memory than one beside an arm that
        waits: where there is no room for them, one after the other. Raises :class:`ArmError`."""
        missing = [arm for arm in pair if not self.is_alive(arm)]
        if len(missing) > 1 and self._room.holds(missing):
            try:
                self._build(missing)
            except ArmError as error:
                if error.code is not R.OUT_OF_MEMORY or pair[0].spec.device != "cuda":
                    raise
        for arm in missing:
            if not self.is_alive(arm) and not self._room.crowded(pair):
                self._build([arm])

    def be_quiet(self) -> None:
        """Nothing is imported any more: what is asked next is timed."""
        if self.spares.importing:
            with self.stopwatch.clock(AHEAD, BUILD):
                self.spares.wait()

    def make_room(self, reference: Arm, fp8: Arm) -> bool:
        """One of these arms ran out of memory. End all others; where there were none, or that did not help before, have
        the two take turns. Both start afresh. Gives whether anything else had memory."""
        if fp8.spec.device != "cuda" or self.takes_turns(fp8):
            return False
        pair = {reference.key, fp8.key}
        if self._processes.keys() - pair and fp8.key not in self._by_themselves:
            self._by_themselves |= pair
            self._end_but(pair)
        else:
            self._separate(reference, fp8)
        self.renew(fp8, reference)
        return True

    def _separate(self, reference: Arm, fp8: Arm) -> None:
        """They turned out not to fit the GPU together."""
        self._turns |= {reference.key, fp8.key}
        self.separated.append(fp8.label)

    def renew(self, *arms: Arm) -> None:
        """Close these arms, so that their next request starts fresh processes."""
        for arm in arms:
            if (process := self._processes.pop(arm.key, None)) is not None:
                process.close()

    def close_all(self) -> None:
        self._end_but(set())

    def close(self) -> None:
        self.close_all()
        self.spares.close()
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
            if found.code is R.TOO_LARGE:
                self._too_large[arm.key] = found
            raise found from None

    def _build(self, arms: Sequence[Arm]) -> None:
        """Build these arms, all at the same time. Raises :class:`ArmError`."""
        started: list[tuple[Arm, ArmProcess]] = []
        try:
            for arm in arms:
                with self.stopwatch.clock(arm.label, BUILD):
                    started.append((arm, self._start_build(arm, self._start(arm))))
            # Another interpreter's or checkout's arm has no spare.
            self.spares.start([arm.spec for arm in self._soon if arm.environment is None], self._new_process)
            for arm, process in started:
                with self.stopwatch.clock(arm.label, BUILD):
                    facts = process.receive(BUILD_SECONDS)
                self._have(arm, process, facts)
        finally:
            for arm, process in started:
                if self._processes.get(arm.key) is not process:
                    process.close()

    def _start_build(self, arm: Arm, process: ArmProcess) -> ArmProcess:
        try:
            process.start_build(replace(arm.spec, first_step=self.facts_of(arm).get("first_step", "")))
        except BaseException:
            process.close()
            raise
        return process

    def _have(self, arm: Arm, process: ArmProcess, facts: dict[str, Any]) -> None:
        self._processes[arm.key], self._facts[arm.key] = process, facts
        self.stopwatch.built(arm.label, facts.get("seconds", {}))

    def _start(self, arm: Arm) -> ArmProcess:
        spare = self.spares.take(arm.spec) if arm.environment is None else None
        return spare or self._new_process(arm.spec, arm.environment)

    def _new_process(self, spec: ArmSpec, environment: ArmEnvironment | None = None) -> ArmProcess:
        how = spec.case.backend, environment, self.gpu is None and spec.device == "cpu"
        with told_as_arm_error(spec.name):
            return ArmProcess(*how, spec.device, spec.case.gpus)

    def tight(self, *arms: Arm, looked_at: bool = False) -> bool:
        """Whether these arms' peaks, or those of steps that are ``looked_at``, do not fit the GPU at once, beside what
        others keep resident. Each must then give its cached memory back before the other works."""
        others = self._processes.keys() - {arm.key for arm in arms}
        turns = any(self.takes_turns(arm) for arm in arms)
        return turns or self._room.tight(arms, others, looked_at)
