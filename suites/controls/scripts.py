"""Controls of the gate on a script: two runs of ``train.py`` as it is, whose words break the one or the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from controls.control import Control, Outcome
from controls.ways import fault
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import C, D, R, W
from pytest_fp8.recipes import SCRIPT
from pytest_fp8.script.command import QUESTIONS, Script

if TYPE_CHECKING:
    from pytest_fp8.pair import Fp8Pair

TRAIN = str(Path(__file__).with_name("train.py"))
HANGS_SECONDS = 5.0
"""What a run that hangs is waited for; a session waits five minutes."""


def runs(fp8: str = "", bf16: str = "", share: float = 0.0, of: str = TRAIN) -> Script:
    """Both runs of the script, with these further words of each."""
    return Script((sys.executable, of), tuple(bf16.split()), ("--fp8", *fp8.split()), share=share)


class Run(Control):
    """``script``: see :func:`runs`. It trains on a CPU, in FP8 through ``torch._scaled_mm``."""

    question = "layers"
    case = Case(OWN, SCRIPT, "none", emulated=True, questions=QUESTIONS, name="train")


class Ends(Run):
    """The FP8 run ends, or never comes to a step: an error in place of an answer."""

    question = "loss"
    ends_arms = True


class Hangs(Ends):
    """It stands still in the middle of what it is asked."""

    @classmethod
    def ask(cls, pair: Fp8Pair | None) -> Outcome:
        assert pair is not None
        pair.fp8.request("losses", timeout=HANGS_SECONDS, steps=pair.case.steps)
        return super().ask(pair)


fault("script-off", W.FP8_OFF, "a script whose --fp8 does nothing", Run, script=runs("--layers 0"))
fault(
    "script-part", W.BELOW_SHARE, "a script with a half of the layers in FP8", Run, script=runs("--layers 2", share=0.8)
)
fault(
    "script-both",
    R.BUILT_IN_FP8,
    "a script in FP8 in both runs",
    Run,
    script=runs(bf16="--fp8"),
    verdicts=("INVALID",),
    breaks=("bf16",),
)
fault(
    "script-late",
    W.CONVERTED_TOO_LATE,
    "a script that converts after it made its optimizer",
    Run,
    script=runs("--late"),
)
fault("script-batch", D.OTHER_WORK, "a script with half the batch in FP8", Run, script=runs("--batch 2"))
fault("script-seed", D.OTHER_MODEL, "a script with another seed in FP8", Run, script=runs("--seed 1"))
fault(
    "script-data",
    D.OTHER_DATA,
    "a script with other batches in FP8",
    Run,
    script=runs("--rows-seed 5"),
    question="loss",
)
fault("script-rate", D.OTHER_OPTIMIZER, "a script with another learning rate in FP8", Run, script=runs("--rate 0.01"))
fault("script-tf32", D.OTHER_SWITCH, "a script with TF32 in the FP8 run alone", Run, script=runs("--tf32"))
fault("script-passes", D.OTHER_PASSES, "a script with two passes a step in FP8", Run, script=runs("--passes 2"))
fault(
    "script-nan",
    C.NOT_FINITE,
    "a script whose loss is NaN in one FP8 step",
    Run,
    script=runs("--then nan"),
    question="loss",
)
fault(
    "script-raises",
    R.ARM_DIED,
    "a script that raises in the middle",
    Ends,
    script=runs("--then error"),
    about="no data",
)
fault("script-killed", R.ARM_DIED, "a script that is killed", Ends, script=runs("--then SIGKILL"), about="SIGKILL")
fault("script-memory", R.OUT_OF_MEMORY, "a script that runs out of memory", Ends, script=runs("--then memory"))
fault("script-ends", W.TOO_SHORT, "a script that has too few steps", Ends, script=runs("--then exit"))
fault("script-no-step", W.NO_TRAINING, "a script that makes no step", Ends, script=runs("--steps 0"))
fault("script-hangs", R.ARM_HUNG, "a script that hangs in the middle", Hangs, script=runs("--then hang"))
fault("script-missing", R.NOT_STARTED, "a command that is not there", Ends, script=Script(("no-such-command", TRAIN)))
