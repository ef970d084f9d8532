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

    NOTHING_CONVERTED = "FP8-L01"
    OTHER_LIBRARY = "FP8-L02"
    NOT_CONVERTED = "FP8-L03"
    LEFT_AND_CONVERTED = "FP8-L04"
    LOST_BEHAVIOUR = "FP8-L05"
    UNACCOUNTED = "FP8-L06"
    FP8_OFF = "FP8-L07"
    OTHER_RECIPE = "FP8-L08"
    NEVER_CALLED = "FP8-L09"
    AGAINST_RECIPE = "FP8-L10"
    FPROP_NOT_IN_FP8 = "FP8-L11"
    DGRAD_NOT_IN_FP8 = "FP8-L12"
    WGRAD_NOT_IN_FP8 = "FP8-L13"
    RECOMPUTE_NOT_IN_FP8 = "FP8-L14"
    UNKNOWN_KERNEL = "FP8-L15"
    LESS_THAN_BASELINE = "FP8-L16"
    STALE_AMAX = "FP8-L17"
    NOTHING_GATHERED = "FP8-L18"
    GATHERS_BF16 = "FP8-L19"
    WEIGHT_GONE = "FP8-L20"
    WEIGHT_RESHAPED = "FP8-L21"
    WEIGHT_CAST = "FP8-L22"
    WEIGHT_CHANGED = "FP8-L23"
    TRAINS_FROZEN = "FP8-L24"
    FREEZES_TRAINED = "FP8-L25"
    UNTIED = "FP8-L26"
    HOOK_GONE = "FP8-L27"
    PASSED_BY = "FP8-L28"
    NOT_IN_OPTIMIZER = "FP8-L29"
    NO_GRADIENT = "FP8-L30"


class D(Code):
    """Do the arms differ in FP8 alone?"""

    OTHER_DATA = "FP8-D01"
    OTHER_INPUTS = "FP8-D02"
    OTHER_MODEL = "FP8-D03"
    OTHER_WORK = "FP8-D04"
    OTHER_PASSES = "FP8-D05"
    OTHER_MODE = "FP8-D06"
    OTHER_RECOMPUTATION = "FP8-D07"
    RECOMPUTED_OTHERWISE = "FP8-D08"
    OTHER_OPERATOR_SETTING = "FP8-D09"
    OTHER_PRECISION = "FP8-D10"
    OTHER_SWITCH = "FP8-D11"
    OTHER_OPTIMIZER = "FP8-D12"
    OTHER_UPDATES = "FP8-D13"
    OTHER_WEIGHTS_TRAINED = "FP8-D14"
    OTHER_RANDOM_NUMBERS = "FP8-D15"
    OTHER_CLIPPING = "FP8-D16"
    OTHER_WAITS = "FP8-D17"


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

    NOTHING_READS_IT = "FP8-P01"
    TRAINER_DECIDES = "FP8-P02"
    LAUNCHER_DECIDES = "FP8-P03"
    ENVIRONMENT_DECIDES = "FP8-P04"
    PROGRAM_DECIDES = "FP8-P05"


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
    UNKNOWN_NAME = "FP8-R12"
    BAD_VALUE = "FP8-R13"
    EMPTY_OPTION = "FP8-R14"
    OPTIONS_EXCLUDE = "FP8-R15"
    NO_REASON = "FP8-R16"
    NOT_IN_INI = "FP8-R17"
    REFUSED_IN_CI = "FP8-R18"
    NOT_WRITABLE = "FP8-R19"
    REPORT_AMONG_BASELINES = "FP8-R20"
    NO_WEIGHTS = "FP8-R21"
    GPU_SHARED = "FP8-R22"
    GPUS_UNLIKE = "FP8-R23"
    BAD_MARK = "FP8-R24"
    NO_CASE = "FP8-R25"
    SAME_NAME = "FP8-R26"
    NOT_EMULATED = "FP8-R27"
    FIELDS_DISAGREE = "FP8-R28"
    ADAPTERS_ALONE = "FP8-R29"
    NO_WORKLOAD = "FP8-R30"
    NOT_A_WORKLOAD = "FP8-R31"
    TWO_MODELS = "FP8-R32"
    NOT_A_FUNCTION = "FP8-R33"
    OTHER_ARGUMENTS = "FP8-R34"
    SAVE_WITHOUT_LOAD = "FP8-R35"
    CANNOT_SHIP = "FP8-R36"
    CANNOT_RUN_HERE = "FP8-R37"
    NOT_INSTALLED = "FP8-R38"
    NOT_A_PYTHON = "FP8-R39"
    NO_REVISION = "FP8-R40"
    NOT_CHECKED_OUT = "FP8-R41"
    NOT_A_REPORT = "FP8-R42"
    FILE_NAME = "FP8-R43"
    NOTHING_RAN = "FP8-R44"
    UNANSWERED = "FP8-R45"
    NO_BASELINES = "FP8-R46"
    NOTHING_STORED = "FP8-R47"
    BASE_NOT_TIMED = "FP8-R48"
    MARK_UNREAD = "FP8-R49"
    NOTHING_ASKED = "FP8-R50"
    EXCEPTION_CAUGHT = "FP8-R51"
    BAD_MODEL = "FP8-R52"
    MODEL_NOT_FRESH = "FP8-R53"
    BUILT_IN_FP8 = "FP8-R54"
    BAD_BATCH = "FP8-R55"
    NO_LOSS = "FP8-R56"
    NOTHING_TRAINABLE = "FP8-R57"
    TRAINABLE_LOST = "FP8-R58"
    BAD_CONVERT = "FP8-R59"
    BAD_OPTIMIZER = "FP8-R60"
    STEP_INCOMPLETE = "FP8-R61"
    MODEL_PASSED_BY = "FP8-R62"
    BAD_PARALLELIZE = "FP8-R63"
    OWN_CHECKPOINT_RAISED = "FP8-R64"
    UNSTORABLE = "FP8-R65"
    STRAY_PARAMETER = "FP8-R66"
    ROWS_OF_A_LAYER = "FP8-R67"
    NO_ROWS = "FP8-R68"
    MIXED_TYPES = "FP8-R69"
    CUDA_IN_EMULATED_ARM = "FP8-R70"
    NO_BF16_OPERATOR = "FP8-R71"
    CLASSES_AS_FLOATS = "FP8-R72"
    SECOND_DERIVATIVE = "FP8-R73"
    CHANGED_IN_PLACE = "FP8-R74"
    SCHEDULE_ENDS = "FP8-R75"
    NEEDS_CLOSURE = "FP8-R76"
    NO_TENSOR = "FP8-R77"
    UNUSED_PARAMETERS = "FP8-R78"
    NEEDS_NCCL = "FP8-R79"
    NOT_ASKED_OF_THIS_CASE = "FP8-R80"
    CANNOT_PICKLE = "FP8-R81"
    NOT_CONTIGUOUS = "FP8-R82"
    COMPUTED_WEIGHT = "FP8-R83"
    RENAMED = "FP8-R84"
    RECOMPUTED_OUTSIDE = "FP8-R85"
    NOTHING_TO_FUSE = "FP8-R86"
    OTHER_SIDES_CODE = "FP8-R87"
    OLD_LIBRARY = "FP8-R88"
    NO_FP8_HARDWARE = "FP8-R89"
    THROTTLED = "FP8-R90"
    NEIGHBOURS = "FP8-R91"
    WRONG_PRODUCT = "FP8-R92"


UNCODED: Code | None = None
