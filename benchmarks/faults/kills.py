"""An arm is killed before each request of each question: an error that says so, or the sound arms' verdict."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.report.record import Notes

CASE = Case("micro", "torchao", "tensorwise", emulated=True)
SLOWEST_SECONDS = 5.0
"""What a killed arm may add to a question."""


@dataclass
class Killer:
    """Kills the arm that is asked, before its n-th request; 0: only counts."""

    before: int
    asked: int = 0
    operation: str = ""
    arm: str = ""

    def __call__(self, arm: ArmProcess, operation: str) -> None:
        self.asked += 1
        if self.asked == self.before:
            self.operation, self.arm = operation, arm.name
            os.kill(arm.pid, signal.SIGKILL)
            while arm.alive:
                time.sleep(0.01)


def asked(question: str, killer: Killer) -> tuple[str, str, float]:
    """The verdict of fresh arms, or the kind of error; the message; the seconds that it took. An error is followed by
    the same question, which must have the sound verdict: it comes behind a plus."""
    pool = ArmPool(None)
    real = ArmProcess.send

    def send(self: ArmProcess, operation: str, **arguments: object) -> None:
        killer(self, operation)
        real(self, operation, **arguments)

    ArmProcess.send = send  # type: ignore[method-assign]
    start = time.monotonic()

    def pair() -> Fp8Pair:
        arms = PairArms(CASE, pool, None)
        arms.start()
        return Fp8Pair(arms, Settings(), Notes().of(CASE.id, ""), None, "")

    def verdict(ask: Callable[[], Fp8Pair]) -> str:
        return str(getattr(ask(), question)().verdict.value)

    try:
        return verdict(pair), "", time.monotonic() - start
    except ArmError as error:
        took = time.monotonic() - start
        return f"{error.code.slug} + {verdict(pair)}", error.message, took
    finally:
        ArmProcess.send = real  # type: ignore[method-assign]
        pool.close()


def campaign(every: int) -> int:
    """Print a line for each kill; gives the number of faults."""
    faults = total = 0
    for question in CASE.questions:
        sound = Killer(0)
        healthy, _, limit = asked(question, sound)
        print(f"{question}: {healthy}, {sound.asked} requests, {limit:.1f} s", flush=True)
        for before in range(1, sound.asked + 1, every):
            killer = Killer(before)
            found, message, took = asked(question, killer)
            wrong = []
            if found not in (healthy, f"arm-died + {healthy}"):
                wrong.append(f"expected: {healthy}, or arm-died + {healthy}")
            if message and "SIGKILL" not in message:
                wrong.append("the cause is missing")
            if message and took > limit + SLOWEST_SECONDS:
                wrong.append(f"{took:.1f} s")
            total, faults = total + 1, faults + bool(wrong)
            where = f"{killer.operation} ({killer.arm})"
            print(f"  before request {before:3}: {where:62} {found:16} {'; '.join(wrong)}", flush=True)
    print(f"{total} kills: ", end="")
    return faults
