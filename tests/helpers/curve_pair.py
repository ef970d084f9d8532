"""Stands in for a pair of arms that are asked for loss curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.stand_in import StandIn
from pytest_fp8 import Case
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.loss.check import judge_gap
from pytest_fp8.questions.loss.evidence import Curve
from pytest_fp8.questions.loss.question import loss_of


class CurvePair:
    """A test's own class adds ``case``, ``fp8`` and ``bf16``."""

    case: Any
    fp8: Any
    bf16: Any

    def __init__(self):
        self.asked = []

    def evidence(self, judge=judge_gap, twin=True, nats=True):
        """What is asked of these arms until their curves decide."""
        arms = StandIn(self.case, Unmoved(self.bf16), self.fp8)
        return arms.run(lambda: loss_of(arms, twin, nats, judge))


class Unmoved:
    """An arm whose losses stay where they are when its weights are moved as FP8 moves products."""

    def __init__(self, arm: Any) -> None:
        self.arm = arm

    def request(self, operation: str, **arguments: Any) -> Any:
        if operation == "moved_losses":
            return [1.0] * (1 + arguments["draws"])
        return self.arm.request(operation, **arguments)


class DriftingPair(CurvePair):
    """Arms whose curves end ``gap`` nats apart, a little more with each seed. From moved weights the FP8 arm ends off
    by ``drift`` to either side, BF16 by what ``again`` gives for the seed."""

    def __init__(self, gap: float, drift: float, again: Callable[[int], float] = lambda seed: 0.0) -> None:
        super().__init__()
        self.case = Case("own", "torchao", "tensorwise", emulated=True, seeds=3)
        self.bf16 = DriftingArm(self, "bf16", 0.0, again)
        self.fp8 = DriftingArm(self, "fp8", gap, lambda seed: drift * (-1) ** seed)


class DriftingArm:
    def __init__(self, arms: CurvePair, name: str, gap: float, moved: Callable[[int], float]) -> None:
        self.arms, self.name, self.gap, self.moved = arms, name, gap, moved

    def request(self, operation: str, seed: int, steps: int, jitter: bool = False, watch: bool = False) -> Any:
        self.arms.asked.append((self.name, seed, jitter))
        assert watch == (self.name == "fp8" and not jitter)
        end = self.gap * (1 + seed / 50) + (self.moved(seed) if jitter else 0.0)
        losses = [5 + seed / 1e4 - t / steps + (end if t else 0.0) for t in range(steps)]
        return to_plain(Curve(seed, losses, [1.0 + (self.name == "fp8")] * steps))
