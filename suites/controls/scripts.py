"""Controls of the gate on a script: two runs of ``train.py`` as it is, whose words break the one or the other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from controls.control import Control, Outcome, fault
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
    nightly = True


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


fault("script-off", "a script whose --fp8 does nothing", W.FP8_OFF, Run, script=runs("--layers 0"), nightly=False)
fault(
    "script-part", "a script with a half of the layers in FP8", W.BELOW_SHARE, Run, script=runs("--layers 2", share=0.8)
)
fault(
    "script-both",
    "a script in FP8 in both runs",
    R.BUILT_IN_FP8,
    Run,
    script=runs(bf16="--fp8"),
    verdicts=("INVALID",),
    breaks=("bf16",),
)
fault(
    "script-late",
    "a script that converts after it made its optimizer",
    W.CONVERTED_TOO_LATE,
    Run,
    script=runs("--late"),
)
fault("script-batch", "a script with half the batch in FP8", D.OTHER_WORK, Run, script=runs("--batch 2"), nightly=False)
fault("script-seed", "a script with another seed in FP8", D.OTHER_MODEL, Run, script=runs("--seed 1"))
fault(
    "script-data",
    "a script with other batches in FP8",
    D.OTHER_DATA,
    Run,
    script=runs("--rows-seed 5"),
    question="loss",
)
fault("script-rate", "a script with another learning rate in FP8", D.OTHER_OPTIMIZER, Run, script=runs("--rate 0.01"))
fault("script-tf32", "a script with TF32 in the FP8 run alone", D.OTHER_SWITCH, Run, script=runs("--tf32"))
fault("script-passes", "a script with two passes a step in FP8", D.OTHER_PASSES, Run, script=runs("--passes 2"))
fault(
    "script-nan",
    "a script whose loss is NaN in one FP8 step",
    C.NOT_FINITE,
    Run,
    script=runs("--then nan"),
    question="loss",
)
fault(
    "script-raises",
    "a script that raises in the middle",
    R.ARM_DIED,
    Ends,
    script=runs("--then error"),
    about="no data",
)
fault("script-killed", "a script that is killed", R.ARM_DIED, Ends, script=runs("--then SIGKILL"), about="SIGKILL")
fault("script-memory", "a script that runs out of memory", R.OUT_OF_MEMORY, Ends, script=runs("--then memory"))
fault("script-ends", "a script that has too few steps", W.TOO_SHORT, Ends, script=runs("--then exit"))
fault("script-no-step", "a script that makes no step", W.NO_TRAINING, Ends, script=runs("--steps 0"))
fault("script-hangs", "a script that hangs in the middle", R.ARM_HUNG, Hangs, script=runs("--then hang"), nightly=False)
fault("script-missing", "a command that is not there", R.NOT_STARTED, Ends, script=Script(("no-such-command", TRAIN)))
