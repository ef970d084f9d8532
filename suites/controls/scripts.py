"""Controls of the gate on a script: two runs of ``train.py``, whose words break the one or the other. And those that
need no arm: of a baseline and of a session."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from controls.control import Control, Outcome, control
from pytest_fp8.case import OWN, Case
from pytest_fp8.codes import B, C, Code, D, R, W
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


_ROWS: tuple[tuple[type[Run], str, Code, str, Script], ...] = (
    (Run, "script-off", W.FP8_OFF, "a script whose --fp8 does nothing", runs("--layers 0")),
    (Run, "script-part", W.BELOW_SHARE, "a script with a half of the layers in FP8", runs("--layers 2", share=0.8)),
    (Run, "script-late", W.CONVERTED_TOO_LATE, "a script that converts after it made its optimizer", runs("--late")),
    (Run, "script-batch", D.OTHER_WORK, "a script with half the batch in FP8", runs("--batch 2")),
    (Run, "script-seed", D.OTHER_MODEL, "a script with another seed in FP8", runs("--seed 1")),
    (Run, "script-rate", D.OTHER_OPTIMIZER, "a script with another learning rate in FP8", runs("--rate 0.01")),
    (Run, "script-tf32", D.OTHER_SWITCH, "a script with TF32 in the FP8 run alone", runs("--tf32")),
    (Run, "script-eval", D.OTHER_MODE, "a script in eval mode in the FP8 run alone", runs("--eval")),
    (Run, "script-float32", D.OTHER_PRECISION, "a script with a head in float32 in FP8", runs("--float32-head")),
    (Run, "script-passes", D.OTHER_PASSES, "a script with two passes a step in FP8", runs("--passes 2")),
    (Run, "script-nan", C.NOT_FINITE, "a script whose loss is NaN in one FP8 step", runs("--then nan")),
    (Ends, "script-raises", R.ARM_DIED, "a script that raises in the middle", runs("--then error")),
    (Ends, "script-killed", R.ARM_DIED, "a script that is killed", runs("--then SIGKILL")),
    (Ends, "script-memory", R.OUT_OF_MEMORY, "a script that runs out of memory", runs("--then memory")),
    (Ends, "script-ends", W.TOO_SHORT, "a script that has too few steps", runs("--then exit")),
    (Ends, "script-no-step", W.NO_TRAINING, "a script that makes no step", runs("--steps 0")),
    (Ends, "script-missing", R.NOT_STARTED, "a command that is not there", Script(("no-such-command", TRAIN))),
    (Hangs, "script-hangs", R.ARM_HUNG, "a script that hangs in the middle", runs("--then hang")),
)
_SAYS = {"script-raises": "no data", "script-killed": "died of SIGKILL"}
for _way, _id, _code, _title, _script in _ROWS:
    control(_id, _code, _title)(_way, script=_script, about=_SAYS.get(_id, ""))
control("script-data", D.OTHER_DATA, "a script with other batches in FP8")(
    Run, script=runs("--rows-seed 5"), question="loss"
)
control("script-both", R.BUILT_IN_FP8, "a script in FP8 in both runs")(
    Run, script=runs(bf16="--fp8"), breaks=("bf16",), verdicts=("INVALID",)
)


# -- without arms -----------------------------------------------------------------------------------------------------


def _asks_a_store(cls: type[Control], pair: None) -> Outcome:
    """An H100's baseline, in the folder and under the name of an H200's."""
    from pytest_fp8.baselines.record import Baseline, StoredSession
    from pytest_fp8.baselines.store import Folder, read_baseline, write_baseline
    from pytest_fp8.errors import BaselineError

    case, digest = "1b-torchao-tensorwise", "0" * 16
    copied = StoredSession("2026-01-01", "", None, "a copy", {"name": "H100"}, {}, "0" * 12, {"fp8_share": [0.8]})
    with tempfile.TemporaryDirectory() as name:
        written = write_baseline(Path(name), Baseline(case, digest, "h100", (copied,)))
        target = Path(name, "h200", written.name)
        target.parent.mkdir()
        written.rename(target)
        try:
            read_baseline(Folder(Path(name)), "h200", case, digest)
        except BaselineError as error:
            return Outcome.of(cls, error)
    return Outcome(cls, "PASS", "the file was compared with")


def _asks_pytest(cls: type[Control], pair: None) -> Outcome:
    """``pytest --fp8-gpu=h200`` where no GPU is visible, in a session of its own."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "test_gate.py").write_text(_SUITE)
        Path(name, "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fp8-gpu=h200", name]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True, timeout=120, check=False)
    told = done.stdout + done.stderr
    return Outcome(cls, "FAIL" if done.returncode else "PASS", told, cls.code if str(cls.code) in told else None)


_SUITE = """
import pytest
from pytest_fp8 import Case

@pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
def test_layers(fp8_pair):
    fp8_pair.assert_layers()
"""
control("foreign-baseline", B.UNREADABLE, "another GPU's baseline under this name")(
    ask=classmethod(_asks_a_store), question="baseline", case=None
)
control("all-skipped", R.NOTHING_RAN, "every test skipped on a declared GPU")(
    ask=classmethod(_asks_pytest), question="session", case=None
)
