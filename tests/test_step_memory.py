"""What the peak of a step counts, on a GPU that is not there: an allocator by hand."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pytest_fp8.worker.server import ArmServer

pytestmark = pytest.mark.slow

WEIGHTS, ACTIVATIONS, WORKSPACE = 50, 40, 32


class Gpu:
    """Counts what torch's allocator would. A cuBLAS workspace stays once a product has taken it."""

    def __init__(self, monkeypatch):
        self.allocated = self.peak = WEIGHTS
        self.workspace = 0
        for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def product(self):
        self.take(WORKSPACE - self.workspace)
        self.workspace = WORKSPACE

    def take(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def clear(self):
        self.allocated, self.workspace = self.allocated - self.workspace, 0

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.peak

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self):
        self.peak = self.allocated


def server(gpu, training_takes_products):
    @contextmanager
    def no_phase(name):
        yield

    def step(batch, phase=no_phase):
        with phase("forward"):
            if training_takes_products:
                gpu.product()
            gpu.take(ACTIVATIONS)
        gpu.take(-ACTIVATIONS)

    made = ArmServer.__new__(ArmServer)
    made.engine = SimpleNamespace(timing_batches=[1, 2], park=lambda: None, synchronize=lambda: None, step=step)
    return made


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("asked_before", [False, True])
def test_the_peak_is_that_of_the_step_whatever_was_asked_before(monkeypatch, own, asked_before):
    """An arm whose products are all Transformer Engine's takes none of cuBLAS's workspaces through torch; the products
    that its numerics are held against do."""
    gpu = Gpu(monkeypatch)
    if asked_before:
        gpu.product()
    found = server(gpu, own).memory()
    assert found["peak_allocated"] == WEIGHTS + ACTIVATIONS + own * WORKSPACE
    assert found["resident"] == WEIGHTS + own * WORKSPACE
