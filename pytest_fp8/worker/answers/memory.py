"""GPU memory of one training step, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.zoo.training import Phase


def forget_workspaces(synchronize: Callable[[], None]) -> None:
    """Give back what cuBLAS keeps for products of torch, 32 MiB on Hopper: other questions may have left it in an arm
    whose own products are all Transformer Engine's. A step takes anew what it needs.

    That the workspaces stay until this call is said in PyTorch's notes on CUDA semantics, "cuBLAS workspaces".
    """
    synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def of_step(synchronize: Callable[[], None], step: Callable[[Phase], Any]) -> dict[str, Any]:
    """Peak bytes in each phase of ``step``, and bytes resident before it. A phase may be entered several times."""
    synchronize()
    peaks: dict[str, dict[str, int]] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        synchronize()
        earlier = peaks.get(name, {"allocated": 0, "reserved": 0})
        peaks[name] = {
            "allocated": max(earlier["allocated"], torch.cuda.max_memory_allocated()),
            "reserved": max(earlier["reserved"], torch.cuda.max_memory_reserved()),
        }

    resident = torch.cuda.memory_allocated()
    step(phase)
    # Evaluations are left out: the arms may evaluate at different steps, and hold more memory there.
    trained = [peak for name, peak in peaks.items() if name != EVALUATION]
    return {
        "resident": resident,
        "phases": peaks,
        "peak_allocated": max(peak["allocated"] for peak in trained),
        "peak_reserved": max(peak["reserved"] for peak in trained),
    }
