"""The identity of each answer that is not PASS, and of each error: ``FP8-L01``.

Messages, report, tests, controls and docs go by the code; words may change. A code is never used for another cause: one
that is retired has a page and no name here. A page, in ``FILE.toml`` beside this module, says what it means, with an
example, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from textwrap import indent


@dataclass(frozen=True)
class Page:
    """What is said of a code. Texts are Markdown of one line; ``example`` is code, a command or a message. Of a retired
    code there is its meaning alone."""

    means: str
    example: str = ""
    instead: str = ""
    """The next step."""
    says: str = ""
    """The headline of a message, with places in braces. Of codes whose messages take their words from here."""
    cause: str = ""
    """The likely cause, where the check that finds it says no other."""

    def text(self, between: str = "\n\n") -> str:
        """Meaning, next step and example. ``between``: the meaning and the next step."""
        words = between.join(filter(None, (self.means, self.instead and f"Instead: {self.instead}")))
        return "\n\n".join(filter(None, (words, indent(self.example.strip("\n"), "    "))))


class Code(StrEnum):
    """``L.NOTHING_CONVERTED``: ``FP8-L01``, ``nothing-converted``."""

    @property
    def slug(self) -> str:
        """The name as it stands in docs."""
        return self.name.lower().replace("_", "-")

    @property
    def anchor(self) -> str:
        """Of its part of docs/codes.md."""
        return f"{self.lower()}-{self.slug}"

    @property
    def page(self) -> Page:
        return pages_of(type(self))[self]


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
    NO_FORWARD_IN_FP8 = "FP8-L31"
    GRADIENTS_NOT_IN_FP8 = "FP8-L32"
    NO_LINEAR_FITS = "FP8-L33"


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
    OTHER_STEPS = "FP8-D40"
    OTHER_RATES = "FP8-D41"
    OTHER_OPTIMIZER_STATE = "FP8-D42"
    GRADIENTS_LEFT = "FP8-D43"
    STANDS_STILL = "FP8-D44"
    FROZEN_MOVES = "FP8-D45"
    NOT_REDUCED = "FP8-D46"


class N(Code):
    """Numerics: does FP8 compute what it should?"""

    NO_FP8_PRODUCT = "FP8-N01"
    OTHER_FORMAT = "FP8-N02"
    FAST_ACCUMULATION = "FP8-N03"
    NOT_FINITE = "FP8-N05"
    WRONG_SCALE = "FP8-N06"
    PART_MISSING = "FP8-N07"
    UNRELATED = "FP8-N08"
    TOO_COARSE = "FP8-N09"
    STALE = "FP8-N10"
    WRONG_BIAS = "FP8-N12"
    OUTLIER = "FP8-N13"
    GRADIENT_TIMES = "FP8-N15"
    BIAS_GRADIENT = "FP8-N17"
    OTHER_GRADIENT = "FP8-N19"
    GRADIENT_REPLACED = "FP8-N21"
    GRADIENT_SCALED = "FP8-N22"
    TOO_SENSITIVE = "FP8-N23"


class C(Code):
    """The loss curve: is the loss still right?"""

    FP8_LOST = "FP8-C01"
    TOO_EXACT = "FP8-C02"
    WEIGHTS_STAND_STILL = "FP8-C03"
    NOT_ANEW = "FP8-C04"
    HIGHER = "FP8-C06"
    LOWER = "FP8-C07"
    MORE_SEEDS = "FP8-C08"
    TOO_NOISY = "FP8-C09"
    NOT_FINITE = "FP8-C13"
    REFERENCE_NOT_FINITE = "FP8-C14"
    CONSTANT = "FP8-C15"
    BIT_EQUAL = "FP8-C17"
    RARE_PRODUCT = "FP8-C19"
    SMALL_STEPS = "FP8-C20"
    NOTHING_LEARNT = "FP8-C23"


class S(Code):
    """Speed: is FP8 really faster?"""

    NO_BASELINE = "FP8-S01"
    FASTER_THAN_BASELINE = "FP8-S02"
    SLOWER_THAN_BASELINE = "FP8-S03"
    LAUNCH_BOUND = "FP8-S04"
    SHORT_OF_MEMORY = "FP8-S05"
    NOT_COMPILED = "FP8-S06"
    SLOW_WIRE = "FP8-S07"
    COSTS_MORE_THAN_IT_SAVES = "FP8-S09"
    HOST_SCATTERS = "FP8-S10"
    SESSIONS_DIFFER = "FP8-S11"
    UNDECIDED = "FP8-S12"
    OTHER_PROCESS = "FP8-S13"
    THROTTLED = "FP8-S14"
    OTHER_ATTENTION = "FP8-S15"
    OTHER_REFERENCE = "FP8-S16"
    NO_BUSY_TIMES = "FP8-S17"
    COMPILED_WHILE_TIMED = "FP8-S18"
    LESS_WORK = "FP8-S19"
    REFERENCE_WAITS = "FP8-S21"
    TOO_GOOD = "FP8-S22"
    SLOWER_THAN_BASE = "FP8-S23"


class M(Code):
    """Memory: what does FP8 cost?"""

    NO_BASELINE = "FP8-M01"
    MORE_MEMORY = "FP8-M02"
    LESS_MEMORY = "FP8-M03"


class K(Code):
    """Checkpoints: can I switch back?"""

    STORED_IN_FP8 = "FP8-K01"
    UNTIED = "FP8-K02"
    WEIGHTS_MISSING = "FP8-K03"
    WEIGHTS_CHANGED = "FP8-K07"
    CHANGED_BY_SAVING = "FP8-K10"
    STRAY_PARAMETERS = "FP8-K11"
    STALE_COPIES = "FP8-K12"
    OPTIMIZER_LOST = "FP8-K13"
    STATE_LOST = "FP8-K14"
    SOURCE_NOT_FINITE = "FP8-K17"
    DATA_NOT_CARRIED = "FP8-K18"
    COMPUTES_OTHERWISE = "FP8-K19"
    STATE_LEFT_BEHIND = "FP8-K20"
    DOES_NOT_GO_ON = "FP8-K22"
    LOAD_REFUSED = "FP8-K24"


class P(Code):
    """Precision: which mixed precision is trained in?"""

    NOTHING_READS_IT = "FP8-P01"
    TRAINER_DECIDES = "FP8-P02"
    PROGRAM_DECIDES = "FP8-P05"


class B(Code):
    """Baselines: files and commands."""

    UNREADABLE = "FP8-B01"
    REDEFINED = "FP8-B06"
    NOT_WRITTEN = "FP8-B09"
    NOTHING_THERE = "FP8-B11"
    UNKNOWN_NAME = "FP8-B12"
    NO_REVISION = "FP8-B13"
    NO_SUITE = "FP8-B14"
    ORPHANED = "FP8-B17"
    TOO_COARSE = "FP8-B18"
    UNEXERCISED = "FP8-B19"
    INCOMPLETE = "FP8-B20"
    MEASURED_OTHERWISE = "FP8-B22"


class R(Code):
    """The run: options, marks, workloads, arms' processes, the session."""

    UNKNOWN_GPU = "FP8-R01"
    OUT_OF_MEMORY = "FP8-R02"
    ARM_RAISED = "FP8-R04"
    ARM_DIED = "FP8-R05"
    ARM_HUNG = "FP8-R06"
    NOT_STARTED = "FP8-R08"
    RANKS_DISAGREE = "FP8-R09"
    UNKNOWN_NAME = "FP8-R12"
    BAD_VALUE = "FP8-R13"
    EMPTY_OPTION = "FP8-R14"
    OPTIONS_EXCLUDE = "FP8-R15"
    NOT_WRITABLE = "FP8-R19"
    REPORT_AMONG_BASELINES = "FP8-R20"
    BAD_MARK = "FP8-R24"
    NO_CASE = "FP8-R25"
    NOT_EMULATED = "FP8-R27"
    FIELDS_DISAGREE = "FP8-R28"
    ADAPTERS_ALONE = "FP8-R29"
    NO_WORKLOAD = "FP8-R30"
    NOT_A_WORKLOAD = "FP8-R31"
    TWO_MODELS = "FP8-R32"
    NOT_A_FUNCTION = "FP8-R33"
    SAVE_WITHOUT_LOAD = "FP8-R35"
    CANNOT_SHIP = "FP8-R36"
    CANNOT_RUN_HERE = "FP8-R37"
    NOT_INSTALLED = "FP8-R38"
    NO_REVISION = "FP8-R40"
    NOT_A_REPORT = "FP8-R42"
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
    BAD_CONVERT = "FP8-R59"
    BAD_OPTIMIZER = "FP8-R60"
    STEP_INCOMPLETE = "FP8-R61"
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
    NO_FP8_HARDWARE = "FP8-R89"


class W(Code):
    """`pytest-fp8 watch`: what does the user's own script compute in FP8?"""

    FP8_OFF = "FP8-W01"
    BELOW_SHARE = "FP8-W02"
    NO_TRAINING = "FP8-W03"
    TOO_SHORT = "FP8-W04"
    NO_STEPS = "FP8-W05"
    PROFILES_ITSELF = "FP8-W06"
    NO_PRODUCTS = "FP8-W07"
    UNSUPPORTED = "FP8-W08"
    NOT_OBSERVED = "FP8-W09"
    OTHER_SETTING_DECIDES = "FP8-W11"
    NOTHING_READ_IT = "FP8-W12"
    NO_HARDWARE = "FP8-W13"
    NOTHING_CONVERTED = "FP8-W14"
    LEFT_OUT = "FP8-W16"
    CONVERTED_TOO_LATE = "FP8-W17"
    FORWARD_ALONE = "FP8-W19"
    STORED_ONLY = "FP8-W21"
    STEPPED_AROUND = "FP8-W22"
    SWITCHED_OFF = "FP8-W23"
    RECOMPUTED_OTHERWISE = "FP8-W24"
    NOT_COMPILED = "FP8-W25"
    COMPILED_WHILE_TIMED = "FP8-W27"


LETTERS: dict[type[Code], str] = {
    L: "layers",
    D: "differ",
    N: "numerics",
    C: "loss",
    S: "speed",
    M: "memory",
    K: "checkpoints",
    P: "precision",
    B: "baselines",
    R: "run",
    W: "watch",
}
"""Class of codes -> its file and its part of docs/codes.md."""


@cache
def pages_of(letter: type[Code]) -> dict[str, Page]:
    """Code -> page, of one letter; the retired ones, of which there is one line each, at the end."""
    import tomllib

    stored = tomllib.loads((Path(__file__).parent / f"{LETTERS[letter]}.toml").read_text())
    retired = {code: Page(means) for code, means in stored.pop("retired", {}).items()}
    return {code: Page(**fields) for code, fields in stored.items()} | retired
