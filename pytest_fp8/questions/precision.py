"""Which mixed precision will be trained in, and which of the settings that disagree decided it? Pure.

From the outside in: the shell's environment, the file or arguments of ``accelerate launch``, ``TrainingArguments``. The
last one that is set wins, and none of them warns about the others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pytest_fp8.codes import UNCODED
from pytest_fp8.questions.findings import fail
from pytest_fp8.verdicts import Decision, passed

QUESTION = "precision"
VARIABLE = "ACCELERATE_MIXED_PRECISION"


@dataclass(frozen=True)
class Switches:
    """What each place asked for: ``fp8``, ``bf16``, ``fp16`` or ``no``; an empty string where it said nothing."""

    environment: str = ""
    """ACCELERATE_MIXED_PRECISION as the user set it, before any launcher."""
    config_file: str = ""
    """``mixed_precision`` of the file that ``accelerate launch`` read, its default one included."""
    arguments: str = ""
    """``bf16=True`` or ``fp16=True`` of ``TrainingArguments``."""
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
    numbers = {**asdict(switches), "winner": winner(switches)}
    if switches.used == "fp8":
        return passed(f"fp8, by {winner(switches)}").answer(QUESTION, numbers)
    return fail(
        UNCODED,
        f"trains in {_word(switches.used) or 'what the program says itself'}, not in fp8",
        expected=f"fp8, asked for by {_askers(switches)}",
        seen=f"{_word(switches.used)}, by {winner(switches)}" if switches.used else "no Accelerator was made",
        cause=who_won(switches),
        next_step=_next_step(switches),
    ).answer(QUESTION, numbers)


def winner(switches: Switches) -> str:
    """The setting that decided, in the user's own words for it."""
    if not switches.used:
        return "nothing"
    if switches.arguments == switches.used:
        return f"{switches.used}=True of the Trainer"
    if switches.launched:
        if switches.config_file == switches.used:
            return "the config file of accelerate launch"
        if switches.process == switches.used:
            return "accelerate launch without a file or --mixed_precision"
    if switches.environment == switches.used:
        return VARIABLE
    return "the program's own Accelerator(mixed_precision=...)"


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
    by = winner(switches)
    # A caller that sees the environment alone does not know the Trainer's arguments. Nothing else turns fp8 into bf16.
    if by.startswith("the program") and switches.used in ("bf16", "fp16"):
        by = f"{switches.used}=True of the Trainer"
    return f"{said} and Accelerate trains in {_word(switches.used)}: {by} wins over it"


def _word(precision: str) -> str:
    return "no mixed precision" if precision == "no" else precision


def _askers(switches: Switches) -> str:
    places = {"the environment": switches.environment, "the config file": switches.config_file}
    return " and ".join(where for where, value in places.items() if value == "fp8") or "this test alone"


def _next_step(switches: Switches) -> str:
    if not switches.used:
        return "make an Accelerator, or a Trainer, and give it the model"
    if switches.arguments == switches.used:
        return f"TrainingArguments({switches.used}=False): fp8 has no argument there, the environment decides"
    if switches.launched:
        return "mixed_precision: fp8 in the config file, or accelerate launch --mixed_precision fp8"
    return f"{VARIABLE}=fp8, or Accelerator(mixed_precision='fp8')"
