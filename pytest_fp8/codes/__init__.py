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

    STORED_IN_FP8 = "FP8-K01"
    UNTIED = "FP8-K02"
    WEIGHTS_MISSING = "FP8-K03"
    KEYS_WITHOUT_A_HOME = "FP8-K04"
    OTHER_SHAPE = "FP8-K05"
    NOTHING_LOADED = "FP8-K06"
    WEIGHTS_CHANGED = "FP8-K07"
    CAST_ON_THE_WAY = "FP8-K08"
    BUFFERS_NOT_CARRIED = "FP8-K09"
    CHANGED_BY_SAVING = "FP8-K10"
    STRAY_PARAMETERS = "FP8-K11"
    STALE_COPIES = "FP8-K12"
    OPTIMIZER_LOST = "FP8-K13"
    SCHEDULE_LOST = "FP8-K14"
    GROUPS_LOST = "FP8-K15"
    ATTRIBUTES_LOST = "FP8-K16"
    OUTPUTS_NOT_FINITE = "FP8-K17"
    DATA_NOT_CARRIED = "FP8-K18"
    COMPUTES_OTHERWISE = "FP8-K19"
    STATE_LEFT_BEHIND = "FP8-K20"
    SOURCE_DIVERGED = "FP8-K21"
    DOES_NOT_GO_ON = "FP8-K22"
    SCALES_LOST = "FP8-K23"
    LOAD_REFUSED = "FP8-K24"


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
    NOT_ASKED_OF_THIS_CASE = "FP8-R80"


UNCODED: Code | None = None
