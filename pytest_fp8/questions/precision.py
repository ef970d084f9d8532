"""Which mixed precision will be trained in, and which of the settings that disagree decided it? Pure.

From the outside in: the shell's environment, the file or arguments of ``accelerate launch``, ``TrainingArguments``. The
last one that is set wins, and none of them warns about the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fp8.codes import P
from pytest_fp8.questions.findings import finding
from pytest_fp8.verdicts import Decision, Figures, passed

QUESTION = "precision"
VARIABLE = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True)
class Switches(Figures):
    """What each place asked for: ``fp8``, ``bf16``, ``fp16`` or ``no``; an empty string where it said nothing."""

    environment: str = ""
    """ACCELERATE_MIXED_PRECISION as the user set it, before any launcher."""
    config_file: str = ""
    """``mixed_precision`` of the file that ``accelerate launch`` read, its default one included."""
    arguments: str | None = None
    """``bf16=True`` or ``fp16=True`` of ``TrainingArguments``; ``None``: not known."""
    launched: bool = False
    """Whether ``accelerate launch`` started the program."""
    process: str | None = None
    """ACCELERATE_MIXED_PRECISION as the program found it; ``None``: as ``environment``."""
    used: str = ""
    """The mixed precision that Accelerate trains in; empty where no Accelerator was made."""
    backend: str = ""
    """The library that Accelerate takes for FP8: ``AO``, ``TE``."""


def check_precision(switches: Switches) -> Decision:
    """PASS where Accelerate trains in FP8; else FAIL, naming what decided."""
    if switches.used == "fp8":
        return passed(f"fp8, by {winner(switches)}").answer(QUESTION, switches)
    used = switches.used
    askers = {"the environment": switches.environment, "the config file": switches.config_file}
    expected = (
        f"fp8, asked for by {' and '.join(w for w, value in askers.items() if value == 'fp8') or 'this test alone'}"
    )
    seen = f"{_word(used)}, by {winner(switches)}" if used else "no Accelerator was made"
    return finding(decided_by(switches), expected, seen, used=_word(used)).answer(QUESTION, switches)


def decided_by(switches: Switches) -> P:
    """The place that decided. The innermost that asks for what is used; where none does, it is the program itself."""
    used = switches.used
    if not used:
        return P.NOTHING_READS_IT
    if switches.arguments == used:
        return P.TRAINER_DECIDES
    if switches.launched and used in (switches.config_file, switches.process):
        return P.LAUNCHER_DECIDES
    if switches.environment == used:
        return P.ENVIRONMENT_DECIDES
    # Where the Trainer's arguments are not known, they are the likely place: nothing else turns fp8 into bf16 so often.
    unknown = switches.arguments is None and used in ("bf16", "fp16")
    return P.TRAINER_DECIDES if unknown else P.PROGRAM_DECIDES


def winner(switches: Switches) -> str:
    """The setting that decided, in the user's own words for it."""
    by = decided_by(switches)
    if by is P.LAUNCHER_DECIDES and switches.config_file != switches.used:
        return "accelerate launch without a file or --mixed_precision"
    return _WORDS[by].format(used=switches.used)


_WORDS = {
    P.NOTHING_READS_IT: "nothing",
    P.TRAINER_DECIDES: "{used}=True of the Trainer",
    P.LAUNCHER_DECIDES: "the config file of accelerate launch",
    P.ENVIRONMENT_DECIDES: VARIABLE,
    P.PROGRAM_DECIDES: "the program's own Accelerator(mixed_precision=...)",
}


def _word(precision: str) -> str:
    return "no mixed precision" if precision == "no" else precision
