"""Which mixed precision will be trained in, and which of the settings that disagree decided it? Pure.

From the outside in: the shell's environment, the file or arguments of ``accelerate launch``, ``TrainingArguments``. The
last one that is set wins, and none of them warns about the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fp8.codes import P
from pytest_fp8.questions.findings import fail
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
    return fail(
        decided_by(switches),
        f"trains in {_word(switches.used) or 'what the program says itself'}, not in fp8",
        expected=f"fp8, asked for by {_askers(switches)}",
        seen=f"{_word(switches.used)}, by {winner(switches)}" if switches.used else "no Accelerator was made",
        cause=who_won(switches),
        next_step=_NEXT[decided_by(switches)].format(used=switches.used),
    ).answer(QUESTION, switches)


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


def who_won(switches: Switches) -> str:
    """Why what the environment or a config file asked for is not what is trained in."""
    if not switches.used:
        return f"{VARIABLE}={switches.environment} is set and nothing in this program reads it"
    asked = [
        f"{where} asks for {value}"
        for where, value in (("the environment", switches.environment), ("the config file", switches.config_file))
        if value and value != switches.used
    ]
    said = " and ".join(asked) or "nothing asks for another"
    return f"{said} and Accelerate trains in {_word(switches.used)}: {winner(switches)} wins over it"


_WORDS = {
    P.NOTHING_READS_IT: "nothing",
    P.TRAINER_DECIDES: "{used}=True of the Trainer",
    P.LAUNCHER_DECIDES: "the config file of accelerate launch",
    P.ENVIRONMENT_DECIDES: VARIABLE,
    P.PROGRAM_DECIDES: "the program's own Accelerator(mixed_precision=...)",
}
_NEXT = {
    P.NOTHING_READS_IT: "make an Accelerator, or a Trainer, and give it the model",
    P.TRAINER_DECIDES: "TrainingArguments({used}=False): fp8 has no argument there, the environment decides",
    P.LAUNCHER_DECIDES: "mixed_precision: fp8 in the config file, or accelerate launch --mixed_precision fp8",
    P.ENVIRONMENT_DECIDES: f"{VARIABLE}=fp8, or Accelerator(mixed_precision='fp8')",
    P.PROGRAM_DECIDES: "Accelerator(mixed_precision='fp8') in the program, or leave mixed_precision out of it",
}


def _word(precision: str) -> str:
    return "no mixed precision" if precision == "no" else precision


def _askers(switches: Switches) -> str:
    places = {"the environment": switches.environment, "the config file": switches.config_file}
    return " and ".join(where for where, value in places.items() if value == "fp8") or "this test alone"
