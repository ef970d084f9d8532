"""The identity of each answer that is not PASS, and of each error: ``FP8-L01``.

Messages, report, tests, controls and docs go by the code; words may change. A code is never used for another cause. Its
page, in ``FILE.toml`` beside this module, says what it means, why it is bad, an example and what to do.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """``L.NOTHING_CONVERTED``: ``FP8-L01``, ``nothing-converted``."""

    @property
    def slug(self) -> str:
        """The name as it stands in docs."""
        return self.name.lower().replace("_", "-")


class L(Code):
    """Layers: is FP8 really running?"""


class D(Code):
    """Do the arms differ in FP8 alone?"""


class N(Code):
    """Numerics: does FP8 compute what it should?"""


class C(Code):
    """The loss curve: is the loss still right?"""

    FP8_LOST = "FP8-C01"
    TOO_EXACT = "FP8-C02"
    WEIGHTS_STAND_STILL = "FP8-C03"
    NOT_ANEW = "FP8-C04"
    MOVE_LESS = "FP8-C05"


class S(Code):
    """Speed: is FP8 really faster?"""


class M(Code):
    """Memory: what does FP8 cost?"""


class K(Code):
    """Checkpoints: can I switch back?"""


class P(Code):
    """Precision: which mixed precision is trained in?"""


class B(Code):
    """Baselines: files and commands."""


class R(Code):
    """The run: options, marks, workloads, arms' processes, the session."""

    UNKNOWN_GPU = "FP8-R01"
    OUT_OF_MEMORY = "FP8-R02"
    TOO_LARGE = "FP8-R03"
    ARM_RAISED = "FP8-R04"
    ARM_DIED = "FP8-R05"
    ARM_HUNG = "FP8-R06"
    UNREADABLE_ANSWER = "FP8-R07"
    NOT_STARTED = "FP8-R08"
    RANKS_DISAGREE = "FP8-R09"
    OTHER_COLLECTIVES = "FP8-R10"
    PORT_TAKEN = "FP8-R11"


UNCODED: Code | None = None
