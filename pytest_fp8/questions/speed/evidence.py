"""Step times of both arms with all that could have disturbed them, and how they are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.layers.evidence import fp8_layers, reference_layers
from pytest_fp8.questions.speed.timing import BlockTimer
from pytest_fp8.rules.speed import BASELINE_BLOCKS, LOOKS


@dataclass(frozen=True)
class TimingEvidence:
    """Milliseconds per step of each block in the order taken; one entry of each list per fresh process."""

    bf16: Sequence[Sequence[float]]
    fp8: Sequence[Sequence[float]]
    throttles: Sequence[str] = ()
    """Reasons why the GPU's clocks were throttled."""
    strangers: Sequence[int] = ()
    """Process ids of others that used the GPU."""
    clocks: Sequence[int] = ()
    """SM clocks seen, in MHz."""
    bf16_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Attention operator -> kernels that it launched."""
    fp8_attention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bf16_cudnn: int | None = None
    """Version of the cuDNN library that the arm's torch uses; ``None`` where it has none."""
    fp8_cudnn: int | None = None
    fp8_compiled: bool = True
    bf16_gpu: Mapping[str, float] = field(default_factory=dict)
    """GPU milliseconds of one profiled step by kind of kernel: ``LayersEvidence.milliseconds``."""
    fp8_gpu: Mapping[str, float] = field(default_factory=dict)


def timing_looks(arms: PairArms, timer: BlockTimer) -> Iterator[TimingEvidence]:
    """The evidence of each look in ``LOOKS``, measured when it is asked for. Raises ``ArmError``."""
    for look in range(len(LOOKS)):
        yield timing_of(arms, timer, look)


def timing_of(arms: PairArms, timer: BlockTimer, look: int) -> TimingEvidence:
    """The evidence of one look; asked once. Raises ``ArmError``."""
    return arms.once(f"timing {look}", lambda: _measured(arms, timer, *LOOKS[look]))


def timing_for_baseline(arms: PairArms, timer: BlockTimer, processes: int) -> TimingEvidence:
    """At least ``processes`` fresh pairs, with as many blocks as a baseline takes. Raises ``ArmError``."""
    return arms.once("timing update", lambda: _measured(arms, timer, processes, BASELINE_BLOCKS))


def _measured(arms: PairArms, timer: BlockTimer, processes: int, blocks: int) -> TimingEvidence:
    timer.measure(processes, blocks)
    fp8, bf16 = fp8_layers(arms), reference_layers(arms)
    return TimingEvidence(
        bf16=[list(x) for x in timer.reference],
        fp8=[list(x) for x in timer.other],
        throttles=timer.throttles,
        strangers=timer.strangers,
        clocks=timer.clocks,
        bf16_attention=bf16.attention,
        fp8_attention=fp8.attention,
        bf16_cudnn=arms.bf16.facts["cudnn"],
        fp8_cudnn=arms.fp8.facts["cudnn"],
        fp8_compiled=arms.fp8.facts["compiled"],
        bf16_gpu=bf16.milliseconds,
        fp8_gpu=fp8.milliseconds,
    )
