"""Arms that run nothing: they answer the protocol with evidence written by hand.

With them the plugin's behaviour on a GPU can be tested where there is none.
"""

from __future__ import annotations

import email.parser  # noqa: F401
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import rich.console
import rich.table  # noqa: F401

# Loaded before pytester takes its snapshot of sys.modules: a module that a test run loads afresh would not be the one
# that install() changed, and libraries would be loaded once more in each run.
import pytest_fp8.arms.pair
import pytest_fp8.arms.pool
import pytest_fp8.backends.bf16
import pytest_fp8.backends.torchao
import pytest_fp8.backends.transformer_engine
import pytest_fp8.baselines.provenance
import pytest_fp8.baselines.store
import pytest_fp8.pair
import pytest_fp8.report.page
import pytest_fp8.report.terminal  # noqa: F401
from helpers.fake_answers import FakeAnswers
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Conditions, Gpu

H200 = Gpu("NVIDIA H200", (9, 0), 150_000_000_000, "580.159.04", 700.0)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, "580.159.04", 700.0)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85_000_000_000, "580.159.04", 400.0)
L40S = Gpu("NVIDIA L40S", (8, 9), 48_000_000_000, "580.159.04", 350.0)
B200 = Gpu("NVIDIA B200", (10, 0), 190_000_000_000, "580.159.04", 1000.0)


def asks(*names: str) -> str:
    """Tests of the cases ``CASES``, each of which asserts one question."""
    return "".join(
        f"""
    @pytest.mark.fp8(cases=CASES, question="{"speedup" if name == "faster" else name}")
    def test_{name}(fp8_pair):
        fp8_pair.assert_{name}()
"""
        for name in names
    )


SUITE = f"""
    import pytest
    from pytest_fp8 import Case

    CASES = [Case("tiny", "torchao", "rowwise"), Case("tiny", "transformer_engine", "current")]
{asks("layers", "loss", "speedup", "faster", "memory")}"""
"""A user's test file: two cases, and what is asked of each."""


LARGE = {"memory": {"allocated": 45 * 2**30, "peak": 60 * 2**30}}
"""Two such arms fit an H200 together, and not an H100."""


@dataclass
class World:
    """What the fake arms say; a test changes it before the run."""

    gpu: Gpu | None = None
    speedup: float = 1.2
    fp8_memory: int = 90
    nan_at: int | None = None
    executed_roles: tuple[str, ...] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    attention: str = "cudnn_flash"
    busy: float | None = None
    """Milliseconds that the GPU works in each step, where a step is profiled."""
    kernels_alone: bool = False
    """Whether steps with kernels alone profiled are there: an FP8 arm's are ``speedup`` times shorter than ``busy``."""
    kernels: float | None = None
    """How many times shorter an FP8 arm's kernels are, where that is not ``speedup``."""
    host: float = 0.0
    """How much the host lengthens each block of an FP8 arm at most, as a fraction."""
    fails: dict[str, R] = field(default_factory=dict)
    """case id -> code of the ArmError that its build ends in."""
    built: list[str] = field(default_factory=list)
    closed: int = 0
    residences: list[tuple[str, list[str]]] = field(default_factory=list)
    """(case id, operations that it was asked) of each process that became an arm, in order."""
    asked: list[tuple[FakeProcess, str, dict[str, Any]]] = field(default_factory=list)
    """(process, operation, arguments) of every request."""
    strangers: tuple[int, ...] = ()
    memory: dict[str, dict[str, Any]] = field(default_factory=lambda: {"8b": LARGE})
    """Model -> what its arms say of their memory when they are built."""
    processes: list[FakeProcess] = field(default_factory=list)
    """All that were started, in order."""
    slower: dict[tuple[str, str], float] = field(default_factory=dict)
    """(``base`` or ``head``, ``fp8`` or ``bf16``) -> how much longer that arm's step takes, as a fraction."""
    left: float = 0.0
    """How much longer an FP8 arm's step takes with Linears left in high precision, as a fraction."""
    alone: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    """(recipe, outputs) -> milliseconds of products and of the rest of a layer by itself: 0.6 and 0.2 elsewhere, in
    BF16 1.0 and 0.1."""


def timed(milliseconds: list[float], compilations: int = 0, retries: int = 0) -> dict[str, Any]:
    """What an arm says of its blocks."""
    counts = {"compilations": compilations, "retries": retries}
    return {"milliseconds": milliseconds, **counts}


class FakeProcess(FakeAnswers):
    """Stands in for ``ArmProcess``."""

    world = World()
    pids = itertools.count(1000)
    """Each seeds the noise of its process."""
    test: Any = None
    """The test that the first of them was given to."""

    def __init__(
        self, backend: str = "bf16", environment: Any = None, fork: bool = False, device: str = "cuda", ranks: int = 1
    ) -> None:
        self.ranks = ranks
        self.side = environment.name if environment is not None else ""
        self.pid = next(FakeProcess.pids)
        self.pids = {self.pid}
        self.alive = True
        self.spec: Any = None
        self.asked: tuple[str, dict[str, Any]] | None = None
        self.backend = backend
        self.told: list[str] = []
        self.noise = np.random.default_rng(self.pid)
        self.world.processes.append(self)

    answer_due = is_built = False

    @property
    def allocated(self) -> int:
        """Bytes that it keeps, and its share of what a build of both needs."""
        return self.world.memory.get(self.spec.case.model, {}).get("memory", {}).get("allocated", 0)

    def start_import(self) -> None: ...

    def start_build(self, spec: Any) -> None:
        assert not self.answer_due, "asked to become an arm before it answered"
        self.spec = spec

    def receive(self, timeout: float = 0) -> Any:
        if self.asked is not None:
            (operation, arguments), self.asked = self.asked, None
            return self.request(operation, **arguments)
        code = self.world.fails.get(self.spec.case.id)
        if code:
            raise ArmError(code, f"the arm {self.spec.name!r} failed", seen=code.slug)
        beside = sum(process.allocated for process in self.world.processes if process.alive and process.is_built)
        if self.world.gpu is not None and self.allocated + beside > self.world.gpu.memory:
            raise ArmError(R.OUT_OF_MEMORY, "no room beside another arm")
        assert threading.current_thread() is threading.main_thread(), "the kernel ends an arm with its thread"
        self.is_built = True
        self.world.built.append(self.spec.case.id)
        self.world.residences.append((self.spec.case.id, self.told))
        return {"cudnn": 91900, "compiled": True, **self.world.memory.get(self.spec.case.model, {})}

    def build(self, spec: Any, timeout: float = 0) -> Any:
        self.start_build(spec)
        return self.receive()

    def close(self) -> None:
        self.world.closed += self.alive
        self.alive = False

    def death(self) -> ArmError:
        return ArmError(R.ARM_DIED, f"the arm {self.spec.name!r} died between two requests")

    def send(self, operation: str, **arguments: Any) -> None:
        self.asked = operation, arguments

    def request(self, operation: str, timeout: float = 0, **arguments: Any) -> Any:
        assert self.alive, "asked after it was closed"
        assert self.asked is None, "asked before it answered"
        self.world.asked.append((self, operation, arguments))
        self.told.append(operation)
        return getattr(self, operation)(**arguments)

    def blocks(self, count: int, steps: int, dropped: int) -> dict[str, Any]:
        base = 100.0 / (self.world.speedup if self.is_fp8 else 1.0)
        base *= 1 + self.world.slower.get((self.side, "fp8" if self.is_fp8 else "bf16"), 0.0)
        base *= 1 + (self.world.left if self.spec.leave else 0.0)
        held_up = self.world.host if self.is_fp8 else 0.0
        times = [
            float(base * np.exp(self.noise.normal(0, 0.002) + held_up * self.noise.random())) for _ in range(count)
        ]
        return timed(times)


def install(monkeypatch: Any, gpu: Gpu | None, **world: Any) -> World:
    """Give this process that GPU and fake arms; the libraries count as installed. A test's arms have the same noise
    whichever tests ran before it."""
    if FakeProcess.test is not monkeypatch:
        FakeProcess.test, FakeProcess.pids = monkeypatch, itertools.count(1000)
    FakeProcess.world = World(gpu, **world)
    absent = "no NVIDIA GPU (fake)"
    monkeypatch.setattr("pytest_fp8.gpu.detect", lambda: (gpu, "" if gpu else absent))
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", FakeProcess)
    monkeypatch.setattr("pytest_fp8.plan.conditions", lambda *_: Conditions(1980, (), FakeProcess.world.strangers))
    monkeypatch.setattr("pytest_fp8.recipes.BackendFacts.available", lambda self: (True, ""))
    return FakeProcess.world


GIB = 2**30


def pairs(pool, model, *recipes):
    return [PairArms(Case(model, "torchao", recipe), pool, None) for recipe in recipes]


def built(world):
    """The live processes that are arms."""
    return [process for process in world.processes if process.alive and process.spec is not None]


def spares(world):
    """The live processes that were started ahead and are no arm yet."""
    return [process for process in world.processes if process.alive and process.spec is None]
