"""How much of a GPU's memory an arm of the suite's models will take, estimated before it is built. In bytes."""

from __future__ import annotations

from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Gpu
from pytest_fp8.recipes import backend_type
from pytest_fp8.zoo.shapes import SHAPES

# Bytes per parameter between steps: BF16 weight and two BF16 Adam moments. Seen on an H200: 6.97 GiB for 1.24e9
# parameters, 44.9 GiB for 8.03e9.
RESIDENT_BYTES = 6
ZERO3_BYTES = 14
"""DeepSpeed's master weights and moments are float32."""
ACCELERATE_BYTES = 12
"""Under FSDP2 Accelerate keeps weights and moments in float32."""
SHARDED = ("fsdp2", "zero3")
"""Ways in which each of several GPUs holds its part of weights and optimizer."""
FROZEN_BYTES = 2
"""Bytes per parameter where only adapters are trained: they and their moments are less than a hundredth of the base."""
CONTEXT_BYTES = int(1.5 * 2**30)
"""The CUDA context and the libraries' workspaces of one process."""
BETWEEN_BLOCKS = 1.05
"""What a step needs over the tensors at its peak, since free memory lies between them. On an H100 a BF16 step of 45.4
GiB found none when 2.9 GiB, 6 % of that, lay free in pieces."""
FILL = 0.92
"""Share of the GPU's memory that is planned with."""

GIB = 2.0**30
LOOKED_AT = 1.85
"""What a step of a user's model takes that is looked at, in either arm, over the larger peak of a pair's compiled
steps: it is not compiled, and it keeps products and operands in FP32. Of the suite's models it has few tokens. Seen on
an H100 with all tokens of 1B, where a BF16 step had 20.5 GiB reserved: 35.1 in BF16 and in torchao's tensorwise and
rowwise recipes, 36.2 with rowwise_with_gw_hp, 36.8 to 37.6 in Transformer Engine's three."""


def resident_bytes(case: Case) -> int:
    """What an arm of this case holds between its steps, on each of its GPUs. There is no estimate for user models."""
    per_parameter = FROZEN_BYTES if case.lora else ZERO3_BYTES if case.parallel == "zero3" else RESIDENT_BYTES
    if case.parallel == "fsdp2" and backend_type(case.backend).through_accelerate:
        per_parameter = ACCELERATE_BYTES
    shards = case.gpus if case.parallel in SHARDED else 1
    return per_parameter * SHAPES[case.model].parameters // shards + CONTEXT_BYTES


def step_bytes(case: Case) -> float:
    """What a training step needs on top of what is resident, roughly. There is no estimate for user models.

    Counted: logits and their gradient in 2 and 4 bytes, and about 30 bytes of saved activations per token, layer and
    hidden unit; half as much again for libraries that keep FP8 copies. Seen on an H200 for 1B: 13.3 GiB in BF16,
    16.6 GiB in Transformer Engine.
    """
    shape = SHAPES[case.model]
    batch, seq = case.batch or shape.batch, case.seq or shape.seq
    return 1.5 * (batch / case.gpus) * seq * (6 * shape.vocab + 30 * shape.layers * shape.hidden)


def exceed_together(case: Case, gpu: Gpu | None) -> bool:
    """Whether what both arms hold between their steps exceeds the GPU: they must take turns, without a first attempt.

    Where it says no, both are built and one may still run out of memory: then they take turns from there on.
    """
    if gpu is None or case.emulated or case.model == OWN:
        return False
    return 2 * resident_bytes(case) > gpu.memory


def peak_bytes(case: Case) -> float:
    """What the process of an arm takes at its peak, roughly; 0 for user models, of which there is no estimate.

    It is high: for 8B it gives 73 GiB in BF16 and 92 GiB with Transformer Engine, where 64.1 and 79.9 GiB were
    allocated at the peak on an H200; and 100 GiB for 8192 tokens, where 83.1 were.
    """
    if case.model == OWN or case.emulated:
        return 0.0
    over = 1.0 if case.lora else backend_type(case.backend).over_bf16
    return over * (resident_bytes(case) + step_bytes(case))


def too_large(error: ArmError, case: Case, gpu: Gpu) -> ArmError:
    """The error of an arm that ran out of memory alone on this GPU, as :data:`peak_bytes` says it must; any other error
    as it is."""
    needed = peak_bytes(case)
    if error.code is not R.OUT_OF_MEMORY or needed <= gpu.memory:
        return error
    over = backend_type(case.backend).over_bf16
    return ArmError(
        R.TOO_LARGE,
        f"{case.id} does not fit this GPU: about {(needed - gpu.memory) / GIB:.0f} GiB are missing",
        expected=f"about {needed / GIB:.0f} GiB for weights, optimizer state and one step (an estimate)",
        seen=f"{gpu.memory / GIB:.1f} GiB on {gpu.name}, no other arm on it; {error.seen}",
        cause=f"this backend's step takes {over:.2f} times BF16's memory" if over != 1 else "",
        next_step=f"a GPU with more memory, a smaller batch or seq, or lora=; or leave it out: -k 'not {case.id}'",
    )
