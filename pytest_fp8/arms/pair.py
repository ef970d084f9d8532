"""The two arms of a case, alive together, and the cache of what they have answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.scratch import CHECKPOINTS, temporary_folder
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Conditions, conditions

T = TypeVar("T")


class TwoArms:
    """Two arms that are measured against each other: a case's, or one case in two environments."""

    def __init__(self, reference: Arm, other: Arm, pool: ArmPool) -> None:
        self.reference, self.other, self.pool = reference, other, pool
        self._answers: dict[str, Any] = {}
        self._then: list[Arm] = []

    def start(self, then: Iterable[Arm] = ()) -> None:
        """Have both arms alive. ``then``: those of the next case; processes for them start meanwhile."""
        self._then = list(then) or self._then
        self.pool.ensure(self.reference, self.other, self._then)

    def renew(self) -> None:
        """Replace both processes by fresh ones. A process that was profiled launches more slowly than before."""
        self.pool.renew(self.other, self.reference)
        self.start()

    @property
    def takes_turns(self) -> bool:
        """Whether the arms do not fit the GPU together."""
        return self.pool.takes_turns(self.other)

    @property
    def tight(self) -> bool:
        """Whether each arm must give its cached memory back before the other runs."""
        return self.pool.tight(self.other, self.reference)

    @property
    def side_by_side(self) -> bool:
        """Whether both can work at the same time on what is neither timed nor weighed."""
        return self.pool.side_by_side(self.other, self.reference)

    def gather(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Run tasks that ask these arms in as few residences as can be; gives the errors of those that ended in one."""
        error = self.pool.is_too_large(self.other)
        return dict.fromkeys(tasks, error) if error is not None else self.pool.residences.gather(tasks)

    def beside(self, operation: str, reference: Callable[[], T], **arguments: Any) -> tuple[Any, T]:
        """The other arm's answer, and what ``reference`` asks of the reference arm: at the same time where they can.
        For what is neither timed nor weighed."""
        if not self.side_by_side:
            return self.other.request(operation, **arguments), reference()
        with self.other.asked(operation, **arguments) as answer:
            found = reference()
            return answer(), found

    def conditions(self) -> Conditions | None:
        """Clocks and neighbours of the arms' GPUs; ``None`` on a CPU. The question itself lets the GPU stand idle."""
        gpu, pool = self.pool.gpu, self.pool
        return conditions(gpu, pool.pids, pool.contexts, self.other.spec.case.gpus) if gpu is not None else None

    # -- the cache of evidence ------------------------------------------------------------------------------------

    def once(self, what: str, ask: Callable[[], T]) -> T:
        """Evidence of these two arms: ``ask`` runs once, later calls give its answer."""
        return self._gathered(self._answers, what, ask)

    def shared(self, what: str, ask: Callable[[], T]) -> T:
        """The same for evidence of the reference alone, which all cases with this reference share."""
        return self._gathered(self.pool.cache, (self.reference.key, what), ask)

    def _gathered(self, cache: MutableMapping[Any, Any], key: Any, ask: Callable[[], T]) -> T:
        def gather() -> T:
            answer: T = self.pool.residences.once(cache, key, ask)
            return answer

        # A part of evidence under way would be of other processes than the rest of it.
        return gather() if self.pool.sequences.current() is not None else self.with_room(gather)

    def with_room(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, as one sequence; asked again from its start, of fresh processes, where one of these arms
        ran out of memory that another one had."""
        while True:
            try:
                with self.pool.sequences.one():
                    return ask()
            except ArmError as error:
                mine = error.code is R.OUT_OF_MEMORY and error.arm in ("", *self._keys())
                if not mine or not self.pool.make_room(self.reference, self.other):
                    raise

    def _keys(self) -> Iterable[str]:
        """Of arms that may want the memory of one of these two."""
        return self.reference.key, self.other.key

    def answered(self, what: str) -> bool:
        """Whether these two arms have evidence whose name begins so."""
        return any(name.startswith(what) for name in self._answers)

    def folder(self, what: str) -> Path:
        """A folder for files of the reference, kept for the other cases that share it."""
        return self.pool.folder(self.reference, what)

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """A folder for files that are deleted when the block is left."""
        return temporary_folder(CHECKPOINTS)


class PairArms(TwoArms):
    """The two live arms of a case: ``bf16`` is the reference."""

    def __init__(
        self,
        case: Case,
        pool: ArmPool,
        workload: str | None,
        fingerprint: str = "",
        fp8_control: str | None = None,
        reference_control: str | None = None,
    ) -> None:
        """``fp8_control``, ``reference_control``: the control that breaks the one arm or the other."""
        self.case, self.digest = case, case.digest(fingerprint)
        self.fp8 = make_arm(case, pool, workload, fingerprint, fp8_control, own_process=case.backend == "bf16")
        self.bf16 = make_arm(case.reference(), pool, workload, fingerprint, reference_control)
        super().__init__(self.bf16, self.fp8, pool)
        alone = replace(case.reference(), gpus=1, parallel="")
        self._alone = make_arm(alone, pool, workload, fingerprint, reference_control)

    def judged_as(self, case: Case) -> PairArms:
        """The same arms, and the same cache of their answers, for a case that differs in *gate* fields alone."""
        judged = copy(self)
        judged.case = case
        return judged

    def _keys(self) -> Iterable[str]:
        return *super()._keys(), self._alone.key

    @contextmanager
    def on_one_gpu(self) -> Iterator[Arm]:
        """The reference of a case on several GPUs, on one of them; it ends with the block."""
        try:
            yield self._alone
        finally:
            self.pool.renew(self._alone)


def make_arm(
    case: Case,
    pool: ArmPool,
    workload: str | None,
    fingerprint: str,
    control: str | None = None,
    own_process: bool = False,
) -> Arm:
    """The arm of a case. Arms with one key are one process: six cases of a model share one reference.

    BF16 measured against BF16 must be two processes all the same (``own_process``), and an arm that a control breaks
    is never shared with a healthy one.
    """
    on_cpu = case.emulated
    threads = cpu_threads(case.gpus) if on_cpu else None
    spec = ArmSpec(case, "cpu" if on_cpu else "cuda", workload, threads, control)
    key = case.digest(fingerprint) + ("-twin" if own_process else "") + (f"-control-{control}" if control else "")
    return pool.arm(key, spec)


def cpu_threads(ranks: int) -> int:
    """Threads of a process on the CPU: all cores this process may use, shared by pytest-xdist's workers, the two arms
    that train beside each other and an arm's ranks; at most 8, since tiny models gain nothing from more. On two cores
    a step of the micro model takes 40 ms with one thread and 55 with two, one of tiny 446 and 785."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * workers)) // ranks)
