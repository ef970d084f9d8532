"""Arms that run nothing: they answer the protocol with evidence written by hand.

With them the plugin's behaviour on a GPU can be tested where there is none.
"""

from __future__ import annotations

import email.parser  # noqa: F401
import itertools
import threading
from base64 import b64encode
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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
from helpers.evidence import arm_ledger
from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Conditions, Gpu
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, Loaded, Saved
from pytest_fp8.questions.layers.evidence import LayersEvidence
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.questions.loss.evidence import Curve, Moved
from pytest_fp8.questions.numerics.evidence import ArmNumerics, Gradients, ProductCheck
from pytest_fp8.recipes import FPROP, RECOMPUTE, ROLES, Reason, Stays, recipe_facts

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


SIZES = {"layers.0.q_proj": (256, 256), "layers.0.up_proj": (256, 768), "lm_head": (256, 1024)}
ROWS = 512
STATE = {"optimizer/w/step": 3}


class FakeAnswers:
    """The operations of an arm, by name. What a test may change of them is in its ``World``."""

    world: Any
    spec: Any
    noise: np.random.Generator

    @property
    def is_fp8(self) -> bool:
        return self.spec.case.backend != "bf16"

    def layers(self) -> dict[str, Any]:
        case = self.spec.case
        roles = self.world.executed_roles or recipe_facts(case.backend, case.recipe).roles
        owed = [*ROLES, *([RECOMPUTE] if case.activation_checkpointing else [])]
        stays = ("lm_head", *(name for name in SIZES for left in self.spec.leave if fnmatchcase(name, left)))
        calls = [LayerCall(n, i, o, ROWS, owed, fp8=self.is_fp8 and n not in stays) for n, (i, o) in SIZES.items()]
        products = []
        for call in calls:
            for role in call.owed:
                phase, inner, outer = call.expected(role, RECOMPUTE)
                on = call.fp8 and (FPROP if role == RECOMPUTE else role) in roles
                kernel = "nvjet_sm90_qqtst_64x8_1" if on else "nvjet_sm90_tst_64x8_1"
                time = (0.03 if on else 0.06) * (self.world.busy or 0.0)
                kind = FP8 if on else "bfloat16"
                products.append(Product(phase, inner, outer, kind, "mm", kernel, milliseconds=time))
        converted = [c.name for c in calls if c.fp8]
        evidence = LayersEvidence(
            originals=SIZES,
            converted=converted,
            skipped={name: Reason(Stays.HEAD, "stays") for name in SIZES if name not in converted},
            live_fp8=converted,
            calls=calls,
            recipes={name: {"recipe": case.recipe, **case.full_options, **self.world.recipe} for name in converted},
            products=products,
            families={FP8: ["nvjet_sm90_qqtst"], "bfloat16": ["nvjet_sm90_tst"]},
            attention={"sdpa": [self.world.attention if self.is_fp8 else "cudnn_flash"]},
            milliseconds=self._milliseconds(products),
            kinds=dict.fromkeys(SIZES, "torch.nn.modules.linear.Linear"),
            switches={"asked": "", "accelerate": ""},
        )
        return {**to_plain(evidence), **self._several_steps()}

    def numerics(self, moved: bool) -> dict[str, Any]:
        sound = {"values": 16384, "power": 1.0, "gain": 1.0, "sqnr": 28.0, "own_gain": 1.0, "own_sqnr": 28.0}
        rest = {"gain_error": 0.0, "lost": 0.0, "underflow": 0.0}
        checks = [ProductCheck(layer=name, role=role, **sound, **rest) for name in SIZES for role in ROLES]
        gradients, others = self._gradients(self.is_fp8), self._gradients(True) if moved else None
        return to_plain(ArmNumerics(checks, gradients, others, checks, checks, checks))

    def _gradients(self, changed: bool) -> Gradients:
        off = 0.05 if changed else 0.0
        numbers = np.cos(np.arange(1024)) + off * np.sin(np.arange(1024) * 7)
        text = b64encode(numbers.astype(np.float32).tobytes()).decode()
        return Gradients(dict.fromkeys(SIZES, text), [], 5.0, 0)

    def busy(self, steps: int) -> dict[str, Any]:
        return self._several_steps(steps)

    def _several_steps(self, steps: int = 5) -> dict[str, Any]:
        if not self.world.kernels_alone or self.world.busy is None:
            return {"step_ms": [], "busy_ms": [], "compute_ms": [], "collectives": []}
        works = self.world.busy / ((self.world.kernels or self.world.speedup) if self.is_fp8 else 1.0)
        busy = [float(works * np.exp(self.noise.normal(0, 0.002))) for _ in range(steps)]
        step = 110.0 / (min(1.0, self.world.speedup) if self.is_fp8 else 1.0)
        return {"step_ms": [step] * steps, "busy_ms": busy, "compute_ms": busy, "collectives": []}

    def ledger(self) -> dict[str, Any]:
        return to_plain(arm_ledger())  # type: ignore[no-any-return]

    def _milliseconds(self, products: list[Product]) -> dict[str, float]:
        if self.world.busy is None:
            return {}
        fp8 = sum(product.milliseconds for product in products if product.kind == FP8)
        others = sum(product.milliseconds for product in products) - fp8
        classes = {"fp8 products": fp8, "other products": others, "attention": 0.1 * self.world.busy}
        return {**classes, "rest": self.world.busy - sum(classes.values()), "busy": self.world.busy}

    def curve(self, seed: int, steps: int, jitter: bool = False, first_step: int = 0, **_: Any) -> dict[str, Any]:
        # Each seed has weights of its own.
        offset = 0.001 * (seed + 1) * (self.is_fp8 + 0.5 * jitter) + 1e-5 * seed
        losses = [5.0 / (1 + step / 10) + offset for step in range(first_step, first_step + steps)]
        if self.is_fp8 and self.world.nan_at is not None:
            losses = [x if step < self.world.nan_at else float("nan") for step, x in enumerate(losses)]
        movement = dict.fromkeys(SIZES, Moved(65536, moved=0.9, reached=1.0))
        return to_plain(Curve(seed, losses, [1.0] * steps, movement=movement))

    def resume(self, seed: int, first_step: int, steps: int) -> dict[str, Any]:
        losses = self.curve(seed, steps, first_step=first_step)["losses"]
        return {**to_plain(NOT_RESUMED), "losses": losses}

    def memory(self) -> dict[str, Any]:
        peak = (self.world.fp8_memory if self.is_fp8 else 100) * 2**30
        phases = dict.fromkeys(("forward", "backward", "optimizer"), peak)
        return {"resident": peak // 2, "phases": phases, "peak_allocated": peak, "peak_reserved": peak, "kinds": {}}

    def alone(self, layers: list[Any], recipes: list[str]) -> dict[str, Any]:
        """Each layer by itself has an input of its own."""

        def times(name: str, outputs: int) -> dict[str, float]:
            usual = (1.0, 0.1) if name == "bf16" else (0.6, 0.2)
            return dict(zip(("products", "rest"), self.world.alone.get((name, outputs), usual), strict=True))

        def group(index: int, size: int) -> dict[str, Any]:
            told = {name: {"all": times(name, size), "without": [times("bf16", size)]} for name in recipes}
            return {"members": [index], "none": times("bf16", size), "recipes": told}

        return {"groups": [group(index, size) for index, (_, _, size, _, _) in enumerate(layers)]}

    def park(self) -> None: ...

    def restart(self, seed: int, jitter: bool = False) -> None: ...

    def save(self, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
        return to_plain(Saved(on_disk={"BF16": 1}, digests={"w": 1}, optimizer_digests=STATE if optimizer else {}))

    def load(self, folder: str, store: str, optimizer: bool, seed: int) -> dict[str, Any]:
        return to_plain(Loaded(digests={"w": 1}, optimizer_digests=STATE if optimizer else {}))

    def logits(self, seed: int) -> bytes:
        return bytes(4) + (np.ones(8, dtype=np.float32) * (1.01 if self.is_fp8 else 1.0)).tobytes()


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


# -- sessions with them -----------------------------------------------------------------------------------------------


def update(reason="first", *more):
    return ("--fp8-gpu=h200", f"--fp8-update={reason}", *more)


TWICE = "During handling of the above exception, another exception occurred"
"""Stands between two errors where the second one hides the first."""
