"""The state of one pytest session: settings, ledger and live arms. What it does at its end is in session_end.py."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fp8.ending import Endings
from pytest_fp8.options import Settings
from pytest_fp8.report.interim import Interim
from pytest_fp8.report.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_fp8.arms.pair import PairArms
    from pytest_fp8.arms.pool import ArmPool
    from pytest_fp8.baselines.review import Revision
    from pytest_fp8.baselines.source import Source
    from pytest_fp8.case import Case
    from pytest_fp8.compare.gate import BaseGate
    from pytest_fp8.compare.session import Comparison
    from pytest_fp8.pair import Fp8Pair
    from pytest_fp8.report.progress import Progress
    from pytest_fp8.workload import Workload


class Session:
    """One per pytest process. Nothing here imports torch; arms start when a test first asks."""

    def __init__(self, settings: Settings, root: Path, is_worker: bool) -> None:
        self.settings, self.root, self.is_worker = settings, root, is_worker
        self.ledger = Ledger()
        self.interim, self.endings = Interim(), Endings()
        self.problems: list[str] = []
        """What made the session fail although no test did."""
        self.written: list[str] = []
        """Paths of the files that the session wrote."""
        self.revisions: list[Revision] = []
        """What an update found, case by case, changed or not."""
        self.notes: list[str] = []
        """What a person should read at the end; no failure."""
        self.upcoming: list[Case] = []
        """The cases of the collected tests, in their order."""
        self.paired: list[Case] = []
        """Those of tests that take both arms."""
        self.progress: Progress | None = None
        self._asked: dict[str, set[str | None]] = {}
        """What this session's tests ask of each case, by its id; ``None``: a test whose mark names no question."""
        self._pool: ArmPool | None = None
        self._arms: dict[tuple[str, str], PairArms] = {}
        self._pairs: dict[tuple[str, str, tuple[object, ...]], Fp8Pair] = {}
        self._base: BaseGate | None = None
        self.base_commit = ""
        self._held = ExitStack()

    def start(self, runs: bool) -> None:
        """Take what the session needs (:mod:`pytest_fp8.session_start`). ``runs``: tests are not only collected. Raises
        :class:`Fp8Error`."""
        from pytest_fp8.session_start import prepare

        self.base_commit = prepare(self.settings, self.root, self._held, runs and not self.is_worker, runs)

    def selected(self, asked: list[tuple[Case, str | None, str]], whole: bool, paired: list[Case]) -> None:
        """Note the collected tests: (case, question, test id) each. Question ``None``: the marks name none, so the test
        may ask any. ``whole``: nothing was left out by a path. ``paired``: the cases of tests that take both arms.
        Raises ``pytest.UsageError``."""
        from pytest_fp8.errors import SettingsError
        from pytest_fp8.markers import one_of_each, require_one_folder

        try:
            require_one_folder(case for case, _, _ in asked)
        except SettingsError as error:
            raise pytest.UsageError(error.message) from None
        self.upcoming, self.paired = one_of_each(case for case, _, _ in asked), one_of_each(paired)
        self.ledger.open_tests = {case.id: [] for case in self.upcoming}
        for case, question, test in asked:
            self._asked.setdefault(case.id, set()).add(question)
            self.ledger.open_tests[case.id].append(test)
        self.ledger.partial |= not whole
        for case in self.upcoming:
            if case.needs_gpu and case.backend != "bf16":
                self.ledger.collected = sorted({*self.ledger.collected, case.id})

    def pair(self, case: Case, workload: Workload | None, test: str) -> Fp8Pair:
        """The pair of a case, its arms alive. A workload that differs in anything is another pair; so is a mark that
        judges otherwise, with the same arms and what they have answered.

        Raises :class:`BaselineError` for a stored baseline that cannot be compared with, and :class:`ArmError`. Whether
        the baseline of a workload is of the same definition is known once its reference arm has run a first step.
        """
        from pytest_fp8.arms.pair import make_arm
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.markers import next_case, running
        from pytest_fp8.shipping import identity

        shipped = workload.ship(test) if workload is not None else None
        # Arms are shared only between identical workloads, random values included.
        model = identity(shipped) if shipped is not None else ""
        key = (case.id, case.digest(model))
        try:
            judged = *key, case.judged_by
            pair = self._pairs.get(judged) or self._new_pair(case, workload, shipped, model)
            self._pairs[judged] = pair
            then = next_case(running(self.paired, self.settings), case, self.is_worker)
            pair.start([make_arm(each, self.pool(), None, "") for each in then])
        except Fp8Error as error:
            self.ledger.error(self.ledger.row(*key), error)
            raise
        return pair

    def _new_pair(self, case: Case, workload: Workload | None, shipped: str | None, model: str) -> Fp8Pair:
        """``shipped``: the workload as its arms are given it. ``model``: its identity, empty without a workload."""
        from pytest_fp8.baselines.store import baseline_path, held_against
        from pytest_fp8.baselines.variance import read_components
        from pytest_fp8.pair import Fp8Pair
        from pytest_fp8.workload import case_digest

        arms = self._arms_of(case, shipped, model)
        if workload is not None:
            arms.start()
        digest = case_digest(case, workload, arms.bf16)
        gpu = self.gpu_key if case.needs_gpu else "emulated"
        baseline, gated = held_against(self.source(), gpu, case.id, digest, self.settings.update)
        pair = Fp8Pair(
            arms,
            self.settings,
            self.ledger,
            baseline,
            self.source().label(baseline_path(Path(), gpu, case.id)),
            digest,
            gpu,
            self.gated_cases,
            time_first=self._may_ask_speed(case),
            components=read_components(self.source(), gpu),
            gated=gated,
            compare_with_base=self._base_of(case, shipped, model),
            asked=self._named(case),
        )
        if self.settings.report_dir is not None:
            from pytest_fp8.report.evidence import evidence_of

            self.ledger.gathers(pair.row, lambda: evidence_of(arms, baseline))
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

        run = running(self.upcoming, self.settings)
        return max(1, sum(case.asks("speedup") and self._may_ask_speed(case) for case in run))

    def _may_ask_speed(self, case: Case) -> bool:
        return bool(self._asked.get(case.id, {None}) & {None, "speedup"})

    def _named(self, case: Case) -> set[str]:
        """The questions that this session's tests are known to ask of a case. Beside a test that may ask any, the speed
        is among them: it must be measured before the others."""
        asked = self._asked.get(case.id, {None})
        named = {question for question in asked if question is not None}
        return named | ({"speedup"} if named and None in asked and case.asks("speedup") else set())

    def _base_of(self, case: Case, shipped: str | None, model: str) -> Callable[[], Comparison] | None:
        """What times base's FP8 arm beside this session's; ``None`` where no base was named."""
        settings = self.settings
        if not settings.base or not case.needs_gpu:
            return None
        from pytest_fp8.compare.gate import BaseGate
        from pytest_fp8.compare.session import Model, Side

        if self._base is None:
            self._base = BaseGate(Side("", self.base_commit), self.root, self.pool, self._held)
        gate = self._base
        return lambda: gate.compare(case, Model(shipped, model), self.gated_cases)

    def pool(self) -> ArmPool:
        if self._pool is None:
            from pytest_fp8.arms.pool import ArmPool
            from pytest_fp8.gpu import detect

            self._pool = ArmPool(detect()[0])
            self._pool.stopwatch.tell = self._waiting
        return self._pool

    @contextlib.contextmanager
    def _waiting(self, arm: str, what: str) -> Iterator[None]:
        """An arm is waited for while the block runs. That may take long: what is known by then is on disk."""
        self.save(waits=True)
        with self.progress.waiting(arm, what) if self.progress is not None else contextlib.nullcontext():
            yield

    def save(self, news: bool = False, waits: bool = False) -> None:
        """Write the report of what is known so far. ``news``: a test has ended; ``waits``: an arm is waited for."""
        self.interim.news |= news
        if not self.is_worker:
            settings = self.settings
            self.interim.write(self.ledger, settings.report_dir, settings.baseline_dir, self.origin, waits)

    def origin(self) -> dict[str, Any]:
        """Where and with what this session measures."""
        from pytest_fp8.baselines.provenance import provenance
        from pytest_fp8.gpu import detect

        gpu = detect()[0]
        measured_on = gpu.describe() if gpu is not None else {"name": "emulated" if self.ledger.entries else "none"}
        return provenance(self.root, measured_on, self.settings.reason, self.settings.baseline_dir)

    def has_something_to_say(self) -> bool:
        """Whether the closing summary has anything in it."""
        return bool(self.ledger.entries or self.ledger.not_run or self.problems or self.written or self.notes)

    def note_durations(self) -> None:
        """Note where the arms' time went so far. A worker that is ended by a signal has no later occasion."""
        if self._pool is not None:
            self.ledger.durations = self._pool.stopwatch.to_json()

    def end_arms(self) -> None:
        """End all arms, and note where their time went."""
        self.note_durations()
        if self._pool is not None:
            self.notes += [
                f"{arm} and its reference did not fit this GPU together: they took turns, which takes longer"
                for arm in self._pool.separated
            ]
            skipped = dict.fromkeys(self._pool.spares.skipped)
            self.notes += [f"not started ahead, which takes longer: {why}" for why in skipped]
            self._pool.separated.clear()
            self._pool.spares.skipped.clear()
            self._pool.close()

    def close(self) -> None:
        """End all arms and give the baselines' lock back, once nothing is written any more."""
        self.end_arms()
        self._held.close()
        self.endings.give_back()

    def source(self) -> Source:
        """Where this session reads its baselines: with a base as they are at that commit, which the change under test
        cannot edit. Where base has none in this folder, or the folder lies in no repository, those of the folder."""
        from pytest_fp8.baselines.source import source_of

        return source_of(self.settings.baseline_dir, self.base_commit)

    @property
    def at_base(self) -> bool:
        """Whether the baselines are read at base's commit."""
        from pytest_fp8.baselines.source import Revision

        return isinstance(self.source(), Revision)

    @property
    def gpu_key(self) -> str:
        """The folder of this machine's baselines; ``none`` without a GPU."""
        from pytest_fp8.gpu import detect

        gpu = detect()[0]
        return gpu.key if gpu is not None else "none"


SESSION = pytest.StashKey[Session]()
"""Where a pytest ``Config`` keeps its session."""
