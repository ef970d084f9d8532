"""The pairs of arms that a session's tests ask: made when a test first asks, with the baseline of each, and base's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fp8.options import Settings
from pytest_fp8.report.record import Notes

if TYPE_CHECKING:
    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.baselines.store import Source
    from pytest_fp8.case import Case
    from pytest_fp8.compare.session import BaseGate, Comparison
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
        self._arms: dict[tuple[str, str], PairArms] = {}
        self._pairs: dict[tuple[str, str, tuple[object, ...]], Fp8Pair] = {}
        self._base: BaseGate | None = None
        self._spreads: dict[str, Components] = {}

    def collected(self, asked: list[tuple[Case, str | None]]) -> None:
        """Note the case and the question of each collected test. Question ``None``: the marks name none, so the test
        may ask any. Raises :class:`SettingsError`."""
        from pytest_fp8.markers import one_of_each, require_one_folder

        require_one_folder(case for case, _ in asked)
        self.cases = one_of_each(case for case, _ in asked)
        for case, question in asked:
            self.asked.setdefault(case.id, set()).add(question)

    def pair(self, case: Case, workload: Workload | None, test: str) -> Fp8Pair:
        """The pair of a case, its arms alive. A workload that differs in anything is another pair; so is a mark that
        judges otherwise, with the same arms and what they have answered.

        Raises :class:`BaselineError` for a stored baseline that cannot be compared with, and :class:`ArmError`. Whether
        the baseline of a workload is of the same definition is known once its reference arm has run a first step.
        """
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.shipping import identity

        try:
            shipped = workload.ship(test) if workload is not None else None
        except Fp8Error as error:
            # Where two cannot be shipped, what each error says tells their rows apart.
            self.notes.of(case.id, error.headline).error("", error)
            raise
        # Arms are shared only between identical workloads, random values included.
        model = identity(shipped) if shipped is not None else ""
        key = case.id, case.digest(model)
        try:
            judged = *key, case.judged_by
            pair = self._pairs.get(judged) or self._new_pair(case, workload, shipped, model)
            self._pairs[judged] = pair
            pair.start()
        except Fp8Error as error:
            self.notes.of(*key).error("", error)
            raise
        return pair

    def script_pair(self, case: Case, script: Script) -> Fp8Script:
        """The pair of a script: both runs of it started, and held once they are warm. Raises :class:`BaselineError` and
        :class:`ArmError`."""
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.script.pair import Fp8Script

        key = case.id, case.digest(script.identity)
        try:
            judged = *key, (*case.judged_by, script.share)
            if (pair := self._pairs.get(judged)) is None:
                digest = case.digest(script.identity)
                pair = self._made(Fp8Script, case, digest, script.to_text(), script.identity)
            assert isinstance(pair, Fp8Script)
            self._pairs[judged], pair.script = pair, script
            pair.start()
        except Fp8Error as error:
            self.notes.of(*key).error("", error)
            raise
        return pair

    def _new_pair(self, case: Case, workload: Workload | None, shipped: str | None, model: str) -> Fp8Pair:
        """``shipped``: the workload as its arms are given it. ``model``: its identity, empty without a workload."""
        from pytest_fp8.pair import Fp8Pair
        from pytest_fp8.workload import case_digest

        arms = self._arms_of(case, shipped, model)
        if workload is not None:
            arms.start()
        return self._made(Fp8Pair, case, case_digest(case, workload, arms.bf16), shipped, model)

    def _made(self, kind: type[P], case: Case, digest: str, shipped: str | None, model: str) -> P:
        """``digest``: the hash of the case as baselines keep it."""
        from pytest_fp8.baselines.store import baseline_path, held_against

        arms = self._arms_of(case, shipped, model)
        gpu = self.gpu_key if case.needs_gpu else "emulated"
        baseline, host_bound = held_against(self.source(), gpu, case.id, digest, self.settings.update)
        pair = kind(
            arms,
            self.settings,
            self.notes.of(case.id, arms.digest, digest, gpu),
            baseline,
            self.source().label(baseline_path(Path(), gpu, case.id)),
            self.gated_cases,
            time_first=self._may_ask_speed(case),
            components=self._components(gpu),
            host_bound=host_bound,
            compare_with_base=self._base_of(case, shipped, model),
            asked=self._named(case),
        )
        if self.settings.report_dir is not None:
            from pytest_fp8.report.evidence import evidence_of

            self.notes.gathers(case.id, arms.digest, lambda: evidence_of(arms, pair.loss_evidence))
        return pair

    def _arms_of(self, case: Case, shipped: str | None, model: str) -> PairArms:
        from pytest_fp8.arms.pair import PairArms

        key = (case.id, case.digest(model))
        if key in self._arms:
            return self._arms[key].judged_as(case)
        return self._arms.setdefault(key, PairArms(case, self.pool(), shipped, model))

    @property
    def gated_cases(self) -> int:
        """Cases that run in this session and are gated on speed: they share its false alarms."""
        from pytest_fp8.markers import running

        run = running(self.cases, self.settings)
        return max(1, sum(case.asks("speedup") and self._may_ask_speed(case) for case in run))

    def _may_ask_speed(self, case: Case) -> bool:
        return bool(self.asked.get(case.id, {None}) & {None, "speedup"})

    def _named(self, case: Case) -> set[str]:
        """The questions that this session's tests are known to ask of a case. Beside a test that may ask any, the speed
        is among them: it must be measured before the others."""
        asked = self.asked.get(case.id, {None})
        named = {question for question in asked if question is not None}
        return named | ({"speedup"} if named and None in asked and case.asks("speedup") else set())

    def _base_of(self, case: Case, shipped: str | None, model: str) -> Callable[[], Comparison] | None:
        """What times base's FP8 arm beside this session's; ``None`` where no base was named."""
        settings = self.settings
        if not settings.base or not case.needs_gpu:
            return None
        from pytest_fp8.compare.session import BaseGate, Model, Side

        if self._base is None:
            self._base = BaseGate(Side("", self.base_commit), self.root, self.pool, self._held)
        gate = self._base
        return lambda: gate.compare(case, Model(shipped, model), self.gated_cases)

    def pool(self) -> ArmPool:
        if self._pool is None:
            from pytest_fp8.arms.pool import ArmPool
            from pytest_fp8.gpu import detect

            self._pool = ArmPool(detect()[0])
            self._pool.stopwatch.tell = self.waiting
        return self._pool

    def seconds(self) -> dict[str, Any]:
        """Where the arms' time went since the last call; empty without arms."""
        return self._pool.stopwatch.take() if self._pool is not None else {}

    def end(self) -> Iterator[str]:
        """End all arms; gives what a person should read of them."""
        if self._pool is not None:
            for arm in self._pool.separated:
                yield f"{arm} and its reference did not fit this GPU together: they took turns, which takes longer"
            self._pool.separated.clear()
            self._pool.close()

    def _components(self, gpu: str) -> Components:
        """How sessions, processes and blocks of this GPU differ, of the stored histories: read once."""
        from pytest_fp8.baselines.store import components_in

        if gpu not in self._spreads:
            self._spreads[gpu] = components_in(self.source(), gpu)
        return self._spreads[gpu]

    def source(self) -> Source:
        """Where this session reads its baselines: with a base as they are at that commit, which the change under test
        cannot edit. Where base has none in this folder, or the folder lies in no repository, those of the folder."""
        from pytest_fp8.baselines.store import source_of

        return source_of(self.settings.baseline_dir, self.base_commit)

    @property
    def at_base(self) -> bool:
        """Whether the baselines are read at base's commit."""
        from pytest_fp8.baselines.store import Revision

        return isinstance(self.source(), Revision)

    @property
    def gpu_key(self) -> str:
        """The folder of this machine's baselines; ``none`` without a GPU."""
        from pytest_fp8.gpu import detect

        gpu = detect()[0]
        return gpu.key if gpu is not None else "none"
