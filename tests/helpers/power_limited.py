"""Arms at a GPU's power limit, which the other arm's turn leaves faster or slower for a while."""

from __future__ import annotations

import math
from contextlib import contextmanager

from helpers.fakes import H200, FakeProcess, install, timed
from pytest_fp8.arms.pool import ArmPool


class PowerLimited(FakeProcess):
    """Each arm's first half second of a turn runs at the clocks that the other arm's power left."""

    sizes: list[tuple[int, int]] = []  # noqa: RUF012

    def blocks(self, count, steps, dropped):
        self.sizes.append((steps, dropped))
        base, first = (280.0, 0.95) if self.is_fp8 else (370.0, 1.04)
        done, times = dropped * base, []
        for _ in range(count):
            early = [done + index * base < 500 for index in range(steps)]
            times.append(sum(base * (first if x else 1.0) for x in early) / steps)
            done += steps * base
        noisy = [float(time * math.exp(self.noise.normal(0, 0.002))) for time in times]
        return timed(noisy)


@contextmanager
def pool_of_limited_arms(monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", PowerLimited)
    PowerLimited.sizes = []
    made = ArmPool(H200)
    yield made
    made.close()
