"""Runs controls: gives each its broken arm, asks the question that must find it, and keeps what others would see.

Nothing of it lands in the session's own ledger, and no baseline is ever written.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fp8.arms.evidence import PairArms
from pytest_fp8.arms.pool import Arm, ArmPool
from pytest_fp8.arms.process import REQUEST_SECONDS, ArmProcess
from pytest_fp8.baselines.store import Baseline, read_baseline, write_baseline
from pytest_fp8.case import Case
from pytest_fp8.controls.control import ANYWHERE, Control
from pytest_fp8.errors import BaselineError
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.ledger import Ledger
from pytest_fp8.verdicts import Decision
from pytest_fp8.workload import Workload


@dataclass(frozen=True)
class Seen:
    """What the checks that people have today would look at. Losses in nats, times in milliseconds a step."""

    kinds: tuple[str, ...] = ()
    """Module path and class of each live layer that was an ``nn.Linear``."""
    fp8_losses: tuple[float, ...] = ()
    bf16_losses: tuple[float, ...] = ()
    fp8_ms: float | None = None
    stored_ms: float | None = None


@dataclass(frozen=True)
class Outcome:
    """A control's run: the verdict, and the words it came with."""

    control: Control
    verdict: str
    headline: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def caught(self) -> bool:
        """Whether the right verdict came with the right cause."""
        return self.verdict in self.control.verdicts and self.control.cause in self.message


class Bench(ArmPool):
    """Two processes for many small arms, one for references and one for FP8 arms: an arm that is asked is built anew
    where its process holds another. Starting a process costs more than all that is asked of an arm."""

    def __init__(self) -> None:
        super().__init__(None)
        self._held: dict[str, tuple[str, ArmProcess]] = {}

    def live(self, arm: Arm) -> ArmProcess:
        held = self._held.get(_side(arm))
        if held is None or held[0] != arm.key or not held[1].alive:
            self._become([arm])
        return self._held[_side(arm)][1]

    def ensure(self, reference: Arm, fp8: Arm, ahead: Iterable[Arm] = ()) -> None:
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

    def _become(self, arms: list[Arm]) -> None:
        for arm in arms:
            _, process = self._held.pop(_side(arm), ("", None))
            process = process if process is not None and process.alive else ArmProcess()
            self._held[_side(arm)] = (arm.key, process)
            # One thread each: products this small lose more to waiting for each other than they gain.
            process.start_build(replace(arm.spec, threads=1))
        try:
            for arm in arms:
                self._facts[arm.key] = self._held[_side(arm)][1].receive(REQUEST_SECONDS)
        except BaseException:
            # One of them is not that arm, the other's answer was not fetched: neither serves the next control.
            for arm in arms:
                self._held.pop(_side(arm))[1].close()
            raise


def _side(arm: Arm) -> str:
    return "bf16" if arm.spec.case.backend == "bf16" else "fp8"


class Laboratory:
    """Where controls are run. ``gpu_pool`` gives the pool for arms on a GPU: the session's own, whose arms are no
    strangers to each other."""

    def __init__(self, settings: Settings, gpu_pool: Callable[[], ArmPool], gpu: str = "none") -> None:
        self._settings = replace(settings, update=False, report_dir=None, strict=False)
        self._gpu_pool, self._gpu = gpu_pool, gpu
        self._bench: Bench | None = None

    def run(self, control: Control) -> Outcome:
        """Raises :class:`ArmError` where an arm fails, which catches nothing."""
        if control.runs == ANYWHERE:
            return _WITHOUT_ARMS[control.question](control)
        pair = self.pair(control)
        try:
            return _ask(control, pair)
        finally:
            if control.leaves_traces:
                pair.fp8.pool.renew(pair.fp8)

    def run_and_look(self, control: Control) -> tuple[Outcome, Seen | None]:
        """The same, and what today's checks would see of the broken arm; ``None`` where there is none."""
        if control.runs == ANYWHERE:
            return self.run(control), None
        pair = self.pair(control)
        try:
            outcome = _ask(control, pair)
            return outcome, _look(pair, outcome)
        finally:
            if control.leaves_traces:
                pair.fp8.pool.renew(pair.fp8)

    def pair(self, control: Control) -> Fp8Pair:
        """The pair of a control, broken as it says."""
        assert control.case is not None, f"control {control.id} has no arms"
        own = None
        if control.workload:
            from pytest_fp8.controls.models import WORKLOADS

            own = WORKLOADS[control.workload]
        return self.pair_of(control.case, own, dict.fromkeys(control.breaks, control.id))

    def pair_of(self, case: Case, own: Workload | None = None, broken: Mapping[str, str] | None = None) -> Fp8Pair:
        """The pair of a case, its decisions noted nowhere. ``broken``: arm (``fp8``, ``bf16``) -> control."""
        broken = broken or {}
        workload = own.ship("a control") if own is not None else None
        fingerprint = own.fingerprint() if own is not None else ""
        digest = case.digest(fingerprint)
        baseline = None if case.emulated else read_baseline(self._settings.baseline_dir, self._gpu, case.id, digest)
        pool = self._pool(case)
        arms = PairArms(case, pool, workload, fingerprint, broken.get("fp8"), broken.get("bf16"))
        arms.start()
        return Fp8Pair(arms, self._settings, Ledger(), baseline, "", digest, self._gpu)

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()

    def _pool(self, case: Case) -> ArmPool:
        if not case.emulated:
            return self._gpu_pool()
        self._bench = self._bench or Bench()
        return self._bench


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "no-compile": {"against_baseline": False},
    "fp8-slower": {"floor": None},
    "both-slower": {"floor": None},
    "slow-attention": {"against_baseline": False},
}
"""The form of the speed question that a control is about: against the floor, or against the baseline."""


def _ask(control: Control, pair: Fp8Pair) -> Outcome:
    decision: Decision = getattr(pair, control.question)(**_ARGUMENTS.get(control.id, {}))
    return Outcome(control, decision.verdict.value, decision.headline, decision.message, decision.numbers)


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


def _foreign_baseline(control: Control) -> Outcome:
    """An H100's baseline, in the folder and under the name of an H200's."""
    measured = {"unit": "x", "direction": "higher", "tolerance": 0.03, "values": [0.11, 0.12]}
    with tempfile.TemporaryDirectory() as name:
        written = write_baseline(Path(name), Baseline("1b-torchao-tensorwise", "0" * 16, "h100", {"speedup": measured}))
        target = Path(name, "h200", written.name)
        target.parent.mkdir()
        written.rename(target)
        try:
            read_baseline(Path(name), "h200", "1b-torchao-tensorwise", "0" * 16)
        except BaselineError as error:
            return Outcome(control, "FAIL", error.headline.replace(name, "baselines"), error.message)
    return Outcome(control, "PASS", "the file was compared with", "")


_SUITE = """
import pytest

@pytest.mark.fp8(model="tiny", backend="torchao", recipe="tensorwise")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()
"""


def _all_skipped(control: Control) -> Outcome:
    """A pytest session of its own on a GPU that is declared and cannot be seen."""
    import os

    with tempfile.TemporaryDirectory() as name:
        Path(name, "test_gate.py").write_text(_SUITE)
        Path(name, "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fp8-gpu=h200", name]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, cwd=name, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    headline = next((line for line in done.stdout.splitlines() if control.cause in line), done.stdout[-200:])
    return Outcome(control, "FAIL" if done.returncode else "PASS", headline, done.stdout)


def _launch_drops_environment(control: Control) -> Outcome:
    """The user's environment asks for fp8; what ``accelerate launch`` starts is asked what it got."""
    from pytest_fp8.questions.precision import check_precision
    from pytest_fp8.resolve import resolve

    decision = check_precision(resolve(environment="fp8", launch=True, asked=("",))[0])
    return Outcome(control, decision.verdict.value, decision.headline, decision.message, decision.numbers)


_WITHOUT_ARMS: dict[str, Callable[[Control], Outcome]] = {
    "baseline": _foreign_baseline,
    "session": _all_skipped,
    "precision": _launch_drops_environment,
}
