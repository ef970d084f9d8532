"""The pairs of arms that a session's tests ask: made when a test first asks, with the baseline of each, and base's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fp8 import gpu as gpus
from pytest_fp8.baselines.store import Folder, baseline_path, components_in, held_against, source_of
from pytest_fp8.markers import one_of_each, running
from pytest_fp8.options import Settings
from pytest_fp8.report.record import CaseNotes, Notes

if TYPE_CHECKING:
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.case import Case
    from pytest_fp8.compare import Comparison, Sides
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.script.command import Script
    from pytest_fp8.script.pair import Fp8Script
    from pytest_fp8.stats.components import Components
    from pytest_fp8.workload import Workload

P = TypeVar("P", bound="Fp8Pair")
Waiting = Callable[[str, str], contextlib.AbstractContextManager[None]]


class Pairs:
    """One per pytest process."""

    def __init__(self, settings: Settings, root: Path, notes: Notes, base_commit: str, held: ExitStack) -> None:
        """``base_commit``: of the revision that is timed beside this one; empty without one. ``held``: closed at the
        session's end, once nothing is written any more."""
        self.settings, self.root, self.notes = settings, root, notes
        self.base_commit, self._held = base_commit, held
        self.cases: list[Case] = []
        """Of the collected tests, in their order."""
        self.asked: dict[str, set[str | None]] = {}
        """What the tests ask of each case, by its id; ``None``: a test whose mark names no question."""
        self.waiting: Waiting | None = None
        """Tells a person what is waited for, (arm, operation), while its block runs."""
        self._pool: ArmPool | None = None
        self._pairs: dict[tuple[str, str, tuple[object, ...]], Fp8Pair] = {}
        self._sides: Sides | None = None
        self._spreads: dict[str, Components] = {}

    def collected(self, asked: list[tuple[Case, str | None]]) -> None:
        """Note the case and the question of each collected test. Question ``None``: the marks name none, so the test
        may ask any."""
        self.cases = one_of_each(case for case, _ in asked)
        for case, question in asked:
            self.asked.setdefault(case.id, set()).add(question)

    def pair(self, case: Case, workload: Workload | None, test: str) -> Fp8Pair:
        """The pair of a case, its arms alive. A workload that differs in anything is another pair; so is a mark that
        judges otherwise, with the same arms and what they have answered.

        Raises :class:`BaselineError` for a stored baseline that cannot be compared with, and :class:`ArmError`. Whether
        the baseline of a workload is of the same definition is known once its reference arm has run a first step.
        """
        from pytest_fp8.pair import Fp8Pair
        from pytest_fp8.shipping import identity

        with self._noted(case, f"unsent, {test}"):
            shipped = workload.ship(test) if workload is not None else None
        # Arms are shared only between identical workloads, random values included.
        model = identity(shipped) if shipped is not None else ""
        return self._started(Fp8Pair, case, case.judged_by, workload, shipped, model)

    def script_pair(self, case: Case, script: Script) -> Fp8Script:
        """The pair of a script: both runs of it started, and held once they are warm. Raises :class:`BaselineError` and
        :class:`ArmError`."""
        from pytest_fp8.script.pair import Fp8Script

        judged = *case.judged_by, script.share
        pair = self._started(Fp8Script, case, judged, None, script.to_text(), script.identity)
        pair.script = script
        return pair

    @contextlib.contextmanager
    def _noted(self, case: Case, model: str) -> Iterator[None]:
        """Note the error that the block ends in."""
        from pytest_fp8.errors import Fp8Error

        try:
            yield
        except Fp8Error as error:
            CaseNotes(self.notes, case.id, model).error("", error)
            raise

    def _started(
        self,
        kind: type[P],
        case: Case,
        judged: tuple[object, ...],
        workload: Workload | None,
        shipped: str | None,
        model: str,
    ) -> P:
        """``judged``: by what its answers are judged. ``shipped``: the workload, or the script, as its arms are given
        it. ``model``: its identity, empty for a model of the zoo."""
        key = case.id, case.digest(model), judged
        with self._noted(case, key[1]):
            if key not in self._pairs:
                self._pairs[key] = self._made(kind, case, workload, shipped, model)
            pair = self._pairs[key]
            assert isinstance(pair, kind)
            pair.start()
        return pair

    def _made(self, kind: type[P], case: Case, workload: Workload | None, shipped: str | None, model: str) -> P:
        from pytest_fp8.arms.pair import PairArms
        from pytest_fp8.report.evidence import evidence_of

        arms = PairArms(case, self.pool(), shipped, model)
        if workload is not None:
            arms.start()
        digest = arms.case_digest(workload)
        gpu = self.gpu_key if case.needs_gpu else "emulated"
        if gpu not in self._spreads:
            self._spreads[gpu] = components_in(self.source, gpu)
        baseline, host_bound = held_against(self.source, gpu, case.id, digest, self.settings.update)
        notes = CaseNotes(self.notes, case.id, arms.digest)
        notes.facts(case_hash=digest, gpu=gpu)
        pair = kind(
            arms,
            self.settings,
            notes,
            baseline,
            self.source.label(baseline_path(Path(), gpu, case.id)),
            self.gated_cases,
            components=self._spreads[gpu],
            host_bound=host_bound,
            compare_with_base=self._base_of(case, shipped, model),
            asked=self.asked.get(case.id, {None}),
        )
        if self.settings.report_dir is not None:
            notes.gather = lambda: evidence_of(arms, pair.loss_evidence)
        return pair

    @property
    def gated_cases(self) -> int:
        """Cases that run in this session and are gated on speed: they share its false alarms."""
        run = running(self.cases, self.settings)
        return max(1, sum(case.asks("speedup") and bool(self.asked[case.id] & {None, "speedup"}) for case in run))

    def _base_of(self, case: Case, shipped: str | None, model: str) -> Callable[[], Comparison] | None:
        """What times base's FP8 arm beside this session's; ``None`` where no base was named."""
        if not self.settings.base or not case.needs_gpu:
            return None
        from pytest_fp8.compare import compare, environments

        def compared() -> Comparison:
            if self._sides is None:
                self._sides = environments(self.base_commit, self.root, self._held)
            return compare(self.pool(), case, (shipped, model), self._sides, self.gated_cases)

        return compared

    def pool(self) -> ArmPool:
        if self._pool is None:
            from pytest_fp8.arms.pool import ArmPool

            self._pool = ArmPool(gpus.detect()[0], running(self.cases, self.settings))
            self._pool.stopwatch.tell = self.waiting
        return self._pool

    def seconds(self) -> dict[str, Any]:
        """Where the arms' time went since the last call; empty without arms."""
        return self._pool.stopwatch.take() if self._pool is not None else {}

    def end(self) -> list[str]:
        """End all arms; gives what a person should read of them."""
        if self._pool is None:
            return []
        apart, self._pool.separated = self._pool.separated, []
        self._pool.close()
        return [f"{arm} and its reference did not fit this GPU together: they took turns" for arm in apart]

    @cached_property
    def source(self) -> Folder:
        """Where this session reads its baselines: with a base as they are at that commit, which the change under test
        cannot edit. Where base has none in this folder, or the folder lies in no repository, those of the folder."""
        return source_of(self.settings.baseline_dir, self.base_commit)

    @property
    def at_base(self) -> bool:
        """Whether the baselines are read at base's commit."""
        return bool(self.source.revision)

    @property
    def gpu_key(self) -> str:
        """The folder of this machine's baselines; ``none`` without a GPU."""
        gpu = gpus.detect()[0]
        return gpu.key if gpu is not None else "none"
