"""Runs controls: gives each its broken arm, asks the question that must find it, and keeps what others would see.

Nothing of it lands in the session's own ledger, and no baseline is ever written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from controls.control import Control, Outcome
from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.asked import REQUEST_SECONDS
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.ranks import AnyProcess, RankedProcess
from pytest_fp8.arms.stopwatch import BUILD, Stopwatch
from pytest_fp8.baselines.source import Source, source_of
from pytest_fp8.baselines.store import read_baseline
from pytest_fp8.case import Case
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.ledger import Ledger
from pytest_fp8.shipping import identity
from pytest_fp8.workload import Workload, case_digest


@dataclass(frozen=True)
class Seen:
    """What the checks that people have today would look at. Losses in nats, times in milliseconds a step."""

    kinds: tuple[str, ...] = ()
    """Module path and class of each live layer that was an ``nn.Linear``."""
    fp8_losses: tuple[float, ...] = ()
    bf16_losses: tuple[float, ...] = ()
    fp8_ms: float | None = None
    stored_ms: float | None = None


class SmallArms(ArmPool):
    """A pool of two small arms, a reference and an FP8 arm, that keeps them until others are asked."""

    def __init__(self, fork: bool, stopwatch: Stopwatch) -> None:
        """``fork``: processes may be forked; not beside a GPU. ``stopwatch``: the session's."""
        super().__init__(None)
        self._fork, self.stopwatch = fork, stopwatch
        self._held: dict[str, tuple[str, AnyProcess]] = {}

    def live(self, arm: Arm) -> AnyProcess:
        held = self._held.get(_side(arm))
        if held is None or held[0] != arm.key or not held[1].alive:
            self._become([arm])
        return self._held[_side(arm)][1]

    def ensure(self, reference: Arm, fp8: Arm, then: Sequence[Arm] = ()) -> None:
        self._become([arm for arm in (reference, fp8) if self._held.get(_side(arm), ("",))[0] != arm.key])

    def renew(self, *arms: Arm) -> None:
        for arm in arms:
            _, process = self._held.pop(_side(arm), ("", None))
            if process is not None:
                process.close()

    def close_all(self) -> None:
        for _, process in self._held.values():
            process.close()
        self._held.clear()

    def _fresh(self, arm: Arm) -> AnyProcess:
        gpus = arm.spec.case.gpus
        return ArmProcess(fork=self._fork) if gpus == 1 else RankedProcess(gpus, fork=self._fork)

    def _become(self, arms: list[Arm]) -> None:
        for arm in arms:
            _, former = self._held.pop(_side(arm), ("", None))
            if former is not None:
                former.close()
            process = self._fresh(arm)
            self._held[_side(arm)] = (arm.key, process)
            # One thread each: products this small lose more to waiting for each other than they gain.
            process.start_build(replace(arm.spec, threads=1))
        try:
            for arm in arms:
                with self.stopwatch.clock(arm.label, BUILD):
                    facts = self._held[_side(arm)][1].receive(REQUEST_SECONDS)
                self._facts[arm.key] = facts
                self.stopwatch.built(arm.label, facts.get("seconds", {}))
        except BaseException:
            # One of them is not that arm, the other's answer was not fetched: neither may serve the next control.
            for arm in arms:
                self._held.pop(_side(arm))[1].close()
            raise


def _side(arm: Arm) -> str:
    case = arm.spec.case
    return f"{'bf16' if case.backend == 'bf16' else 'fp8'} of {case.gpus}"


class ControlRunner:
    """Runs controls, and healthy cases as controls are run.

    ``gpu_pool`` gives the pool for arms on a GPU: the session's own, so that no arm is another process that disturbs
    it. Where the session has no GPU, all others run in processes of their own.
    """

    def __init__(self, settings: Settings, gpu_pool: Callable[[], ArmPool], gpu: str = "none") -> None:
        self._settings = replace(settings, update=False, report_dir=None, strict=False)
        self._gpu_pool, self._gpu = gpu_pool, gpu
        self._small: SmallArms | None = None

    def run(self, control: type[Control]) -> Outcome:
        """Raises :class:`ArmError` where an arm fails, which catches nothing."""
        return self._run(control, look=False)[0]

    def run_and_look(self, control: type[Control]) -> tuple[Outcome, Seen | None]:
        """The same, and what today's checks would see of the broken arm; ``None`` where there is none."""
        return self._run(control, look=True)

    def _run(self, control: type[Control], look: bool) -> tuple[Outcome, Seen | None]:
        if control.case is None:
            return control.ask(None), None
        broken = dict.fromkeys(control.breaks, control.path())
        pair = self.pair_of(control.case, control.workload, broken)
        try:
            outcome = control.ask(pair)
            return outcome, _look(pair, outcome) if look and not control.ends_arms else None
        finally:
            if control.leaves_traces:
                pair.fp8.pool.renew(pair.fp8)

    def pair_of(self, case: Case, own: Workload | None = None, broken: Mapping[str, str] | None = None) -> Fp8Pair:
        """The pair of a case, its decisions noted nowhere. ``broken``: arm (``fp8``, ``bf16``) -> path of a control."""
        broken = broken or {}
        workload = own.ship("a control") if own is not None else None
        model = identity(workload) if workload is not None else ""
        arms = PairArms(case, self._pool(case), workload, model, broken.get("fp8"), broken.get("bf16"))
        digest = case_digest(case, own, arms.bf16)
        baseline = None if case.emulated else read_baseline(self._source(), self._gpu, case.id, digest)
        arms.start()
        return Fp8Pair(arms, self._settings, Ledger(), baseline, "", digest, self._gpu)

    def _source(self) -> Source:
        return source_of(self._settings.baseline_dir, self._settings.baselines_from)

    def close(self) -> None:
        if self._small is not None:
            self._small.close()

    def _pool(self, case: Case) -> ArmPool:
        if not case.emulated:
            return self._gpu_pool()
        if self._small is None:
            pool = self._gpu_pool()
            self._small = SmallArms(fork=pool.gpu is None, stopwatch=pool.stopwatch)
        return self._small


def _look(pair: Fp8Pair, outcome: Outcome) -> Seen:
    """What today's checks need: the modules, one run of each arm, the step time."""
    wanted = {"seed": 0, "steps": pair.case.horizon}
    fp8, bf16 = (arm.request("curve", **wanted)["losses"] for arm in (pair.fp8, pair.bf16))
    stored = pair.baseline.values("fp8_ms") if pair.baseline is not None else []
    return Seen(
        kinds=tuple(pair.fp8.request("layers")["kinds"].values()),
        fp8_losses=tuple(fp8),
        bf16_losses=tuple(bf16),
        fp8_ms=outcome.numbers.get("fp8_ms"),
        stored_ms=min(stored) if stored else None,
    )
