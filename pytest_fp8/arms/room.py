"""What a GPU's memory still holds beside the arms on it: from what each said when it was built, else estimated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.memory_plan import (
    BETWEEN_BLOCKS,
    CONTEXT_BYTES,
    FILL,
    LOOKED_AT,
    peak_bytes,
)
from pytest_fp8.gpu import Gpu
from pytest_fp8.recipes import backend_type

if TYPE_CHECKING:
    from pytest_fp8.arms.arm import Arm


class Room:
    """The memory of the GPU that a session's arms share; ``gpu=None``: there is none, and all of it fits."""

    def __init__(self, gpu: Gpu | None, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """``facts``: what each arm said when it was last built, by its key."""
        self.gpu, self._facts = gpu, facts

    def tight(self, arms: Sequence[Arm], others: Iterable[str], looked_at: bool) -> bool:
        """Whether these arms' peaks, or those of steps that are ``looked_at``, do not fit at once beside what
        ``others`` keep resident."""
        if self.gpu is None:
            return False
        said = [self._said(arm.key, "peak") + CONTEXT_BYTES for arm in arms]
        taken = len(arms) * LOOKED_AT * max(said) if looked_at else sum(said)
        return taken + self._held(others) > FILL * self.gpu.memory

    def crowded(self, pair: Sequence[Arm]) -> bool:
        """Whether a step of one of these arms needs more than the other one leaves it between its own. It may go on
        without the allocator's cache, but then no time is one of FP8. An FP8 arm that was not built yet is taken to
        hold what its reference, the first of the pair, does."""
        if self.gpu is None:
            return False
        held = self._said(pair[0].key, "allocated")
        return (
            self.gpu.memory
            < max(
                BETWEEN_BLOCKS * self._said(arm.key, "step") + (self._said(other.key, "allocated") or held)
                for arm, other in (pair, pair[::-1])
            )
            + len(pair) * CONTEXT_BYTES
        )

    def holds(self, arms: Iterable[Arm]) -> bool:
        """Whether nothing says that these arms cannot warm up at once."""
        return self.gpu is None or sum(map(self._peak, arms)) <= FILL * self.gpu.memory

    def _held(self, keys: Iterable[str]) -> int:
        """Bytes that these arms hold between their steps."""
        return sum(self._said(key, "allocated") + CONTEXT_BYTES for key in keys)

    def _peak(self, arm: Arm) -> float:
        """Bytes that this arm's process takes at its peak: as it said, or from what its reference said."""
        case = arm.spec.case
        if peak := self._said(arm.key, "peak"):
            return peak + CONTEXT_BYTES
        if peak := self._said(case.reference().digest(), "peak"):
            told = backend_type(case.backend).over_bf16 * peak + CONTEXT_BYTES
            # What is not compiled takes more than a compiled reference.
            return told if case.compile == case.reference().compile else max(told, peak_bytes(case))
        return peak_bytes(case)

    def _said(self, key: str, what: str) -> int:
        return int(self._facts.get(key, {}).get("memory", {}).get(what, 0))
