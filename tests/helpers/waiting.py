"""Arms whose steps wait for their host, and what an update and a gate make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers.fakes import H200, FakeProcess, timed
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.questions.speed.question import SpeedQuestion
from pytest_fp8.stats.components import MEASURED
from pytest_fp8.verdicts import Decision


class Waiting(FakeProcess):
    """The GPU works 40 ms of each step of 100 ms in BF16, and 32 ms in FP8."""

    asked_busy: list[int] = []  # noqa: RUF012

    @property
    def works(self) -> float:
        return 32.0 if self.is_fp8 else 40.0

    def layers(self) -> dict[str, Any]:
        found = super().layers()
        found["milliseconds"]["busy"] = self.works
        return {**found, **self.steps()}

    def busy(self, steps: int) -> dict[str, Any]:
        self.asked_busy.append(self.pid)
        return self.steps(steps)

    def steps(self, count: int = 5) -> dict[str, Any]:
        works = [self.works * float(1 + self.noise.normal(0, 0.001)) for _ in range(count)]
        return {"step_ms": [100.0] * count, "busy_ms": works, "compute_ms": works, "collectives": []}


class Scattering(Waiting):
    """The GPU works 92 ms of a step of BF16's and 86 of FP8's. The host holds up all blocks of FP8 a little, in some
    processes more than in others, and half of them by 6 %."""

    @property
    def works(self) -> float:
        return 86.0 if self.is_fp8 else 92.0

    def blocks(self, count: int, steps: int, dropped: int) -> dict[str, Any]:
        slow = 0.01 * (len(self.world.built) // 2 % 3)
        late = [slow + 0.06 * self.noise.integers(2) if self.is_fp8 else 0.0 for _ in range(count)]
        return timed([(self.works + 2) * float(1 + each) for each in late])

    def busy(self, steps: int) -> dict[str, Any]:
        return {**super().busy(steps), "step_ms": [self.works + 2] * steps}


class Quiet(Scattering):
    """On a host that holds nothing up."""

    def blocks(self, count: int, steps: int, dropped: int) -> dict[str, Any]:
        return timed([(self.works + 2) * float(1 + self.noise.normal(0, 0.003)) for _ in range(count)])


def updated(processes: int, host_bound: bool = False) -> tuple[Decision, dict[str, Any]]:
    """What an update decides and stores of the speed of a case of 1B."""
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    question = SpeedQuestion(arms, host_bound, lambda _: [], MEASURED, "file.json", 30, processes=processes)
    decision, rows = arms.run(lambda: question.decide(None))
    pool.close()
    return decision, {name: values for name, values, _ in rows}


def asked_of(stored: dict[str, Any], kept: Sequence[str] = ("speedup", "bf16_ms", "busy_speedup")) -> Decision:
    """What a gate decides where these metrics of an update are stored."""
    pool = ArmPool(H200)
    arms = PairArms(Case("1b", "torchao", "tensorwise"), pool, None)
    arms.start()
    question = SpeedQuestion(
        arms, False, lambda name: [stored[name]] if name in kept else [], MEASURED, "file.json", 30
    )
    decision, _ = arms.run(lambda: question.decide(None))
    pool.close()
    return decision
