"""Breakages of the training run: its data, its gradients, one bad value, its speed and its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import Conversion
from pytest_fp8.controls.execution import fp8_layers
from pytest_fp8.worker.fault_points import FaultPoints

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine


class OtherData(FaultPoints):
    """The arm draws its batches from another seed."""

    def batch(self, seed: int, step: int) -> tuple[int, int]:
        return seed + 1000, step


class NanAtStep40(FaultPoints):
    """One weight becomes NaN just before step 40 of each curve."""

    def before_step(self, engine: Engine, seed: int, step: int) -> None:
        if step == 39:
            poison(engine)


class NanInOneRun(FaultPoints):
    """The same in one seed of four, before step 12."""

    def before_step(self, engine: Engine, seed: int, step: int) -> None:
        if seed == 2 and step == 11:
            poison(engine)


@torch.no_grad()
def poison(engine: Engine) -> None:
    """One NaN in one FP8 layer's weight, as a store out of bounds leaves it."""
    fp8_layers(engine)[0].weight.view(-1)[0] = float("nan")


class SmallGradientsLost(FaultPoints):
    """Gradients below a share of their tensor's largest become zero, as under a stale scale in E5M2: training goes on,
    more slowly, and ends about 3 % higher."""

    share = 0.45

    def convert(self, engine: Engine, convert: Callable[[], Conversion]) -> Conversion:
        meant = convert()
        for layer in fp8_layers(engine):
            layer.weight.register_post_accumulate_grad_hook(self._flush)
        return meant

    def _flush(self, weight: torch.Tensor) -> None:
        gradient = weight.grad
        assert gradient is not None
        gradient.masked_fill_(gradient.abs() < self.share * gradient.abs().max(), 0.0)


class NotCompiled(FaultPoints):
    """The case asks for ``torch.compile`` and the FP8 arm does without."""

    compiles = False


class Slower(FaultPoints):
    """The GPU multiplies after each step for a share of the step's own time, which the arm's first timed steps give.

    It does not merely wait: a GPU at its power limit that rests for 3 % of the time runs the other 97 % at a higher
    clock. Seen on an H200: of 10 % spent waiting, the step took 8.
    """

    share = 0.0
    warm_up, measured = 4, 5

    def __init__(self) -> None:
        self._steps = 0
        self._events: list[Any] = []
        self._products: Products | None = None
        self._count = 0

    def stepped(self, engine: Engine) -> None:
        self._steps += 1
        if self._products is not None:
            self._products.run(self._count)
        elif self._steps > self.warm_up:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
            if len(self._events) > self.measured:
                self._products = Products(engine.device)
                self._count = round(self.share * self._milliseconds() / self._products.milliseconds())

    def _milliseconds(self) -> float:
        """The median: between two requests lies the other arm's turn."""
        self._events[-1].synchronize()
        return statistics.median(float(a.elapsed_time(b)) for a, b in pairwise(self._events))


class ThreePerCentSlower(Slower):
    share = 0.031


class TenPerCentSlower(Slower):
    share = 0.10


class Products:
    """Products of two random square matrices in BF16, of about a fifth of a millisecond each on an H200."""

    size = 4096
    warm_up, measured = 50, 200

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.size, self.size)
        self._a = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        self._b = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        self._out = torch.empty_like(self._a)

    def run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._a, self._b, out=self._out)

    def milliseconds(self) -> float:
        """One product's time, with the GPU as warm as in training."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.run(self.warm_up)
        start.record()
        self.run(self.measured)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / self.measured


class SlowAttention(FaultPoints):
    """Attention falls back to the memory-efficient kernel, or to flash, as in a process with two cuDNN libraries."""

    def start(self, engine: Engine) -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # The cache of compiled code is asked before attention is chosen, so that a healthy arm's code may be taken: on
        # an H200 this arm ran cuDNN's kernel with the cache on.
        torch._inductor.config.force_disable_caches = True
        # Flash is where grouped heads end up that the memory-efficient kernel does not take; never cuDNN.
        order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        engine.attention.enter_context(sdpa_kernel(order, set_priority=True))


class MemoryUpByTwoThirds(FaultPoints):
    """An allocation of two thirds of the step's peak that is kept, as FP8 copies of frozen weights are."""

    def warm(self, engine: Engine) -> None:
        peak = torch.cuda.max_memory_allocated()
        self._kept = torch.empty(peak * 2 // 3, dtype=torch.uint8, device=engine.device)
