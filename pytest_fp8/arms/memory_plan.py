"""How much of a GPU's memory an arm of the suite's models will take, estimated before it is built. In bytes."""

from __future__ import annotations

from pytest_fp8.case import OWN, Case
from pytest_fp8.gpu import Gpu
from pytest_fp8.zoo.shapes import SHAPES

# Bytes per parameter between steps: BF16 weight and two BF16 Adam moments. Seen on an H200: 6.97 GiB for 1.24e9
# parameters, 44.9 GiB for 8.03e9.
RESIDENT_BYTES = 6
FROZEN_BYTES = 2
"""Bytes per parameter where only adapters are trained: they and their moments are less than a hundredth of the base."""
CONTEXT_BYTES = int(1.5 * 2**30)
"""The CUDA context and the libraries' workspaces of one process."""
FILL = 0.92
"""Share of the GPU's memory that is planned with."""


def resident_bytes(case: Case) -> int:
    """What an arm of this case holds between its steps. There is no estimate for user models."""
    per_parameter = FROZEN_BYTES if case.lora else RESIDENT_BYTES
    return per_parameter * SHAPES[case.model].parameters + CONTEXT_BYTES


def step_bytes(case: Case) -> float:
    """What a training step needs on top of what is resident, roughly. There is no estimate for user models.

    Counted: logits and their gradient in 2 and 4 bytes, and about 30 bytes of saved activations per token, layer and
    hidden unit; half as much again for libraries that keep FP8 copies. Seen on an H200 for 1B: 13.3 GiB in BF16,
    16.6 GiB in Transformer Engine.
    """
    shape = SHAPES[case.model]
    batch, seq = case.batch or shape.batch, case.seq or shape.seq
    return 1.5 * batch * seq * (6 * shape.vocab + 30 * shape.layers * shape.hidden)


def exceed_together(case: Case, gpu: Gpu | None) -> bool:
    """Whether what both arms hold between their steps exceeds the GPU: they must take turns, without a first attempt.

    Where it says no, both are built and one may still run out of memory: then they take turns from there on.
    """
    if gpu is None or case.emulated or case.model == OWN:
        return False
    return 2 * resident_bytes(case) > gpu.memory
