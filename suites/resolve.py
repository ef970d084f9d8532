"""Asks Accelerate and the Trainer which mixed precision they resolve to; trains nothing and needs no GPU.

:func:`resolve` starts the program below in a process of its own, with ``accelerate launch`` where a launch or a config
file is asked for. By hand, in this folder: ``accelerate launch --config_file fp8.yaml -m resolve``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.precision import VARIABLE, Switches

SECONDS = 180
MARK = "pytest-fp8 resolved: "


def resolve(
    environment: str = "", config_file: Path | None = None, launch: bool = False, asked: Sequence[str] = ("", "bf16")
) -> list[Switches]:
    """The precision that is trained in, for each of ``asked`` (``bf16``: ``TrainingArguments(bf16=True)``; empty: no
    flag).

    ``environment`` is the user's ACCELERATE_MIXED_PRECISION. This machine's default config and its other ACCELERATE_
    variables are not read. An answer is kept: the same question, in the same environment, is asked once. Raises
    :class:`ArmError`, with the end of the program's output, where the program fails.
    """
    launched = launch or config_file is not None
    program = ["-m", "resolve", *(f"--ask={what}" for what in asked)]
    command = [sys.executable, *program]
    if launched:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
        command += [f"--config_file={config_file}", *program] if config_file is not None else program
    content = config_file.read_bytes() if config_file is not None else b""
    lines = answers(tuple(command), tuple(sorted(_clean(environment).items())), os.getcwd(), content)
    outside = {"environment": environment, "launched": launched, "config_file": precision_in(config_file)}
    return [from_plain(Switches, {**json.loads(line), **outside}) for line in lines]


@functools.cache
def answers(
    command: tuple[str, ...], environment: tuple[tuple[str, str], ...], folder: str, content: bytes
) -> tuple[str, ...]:
    """The answers that the program printed, one line each.

    ``folder`` (where the program is started) and ``content`` (the config file's) are part of the cache's key alone.
    The cache keeps no exception.
    """
    with tempfile.TemporaryDirectory() as home:
        done = run_program(list(command), {**dict(environment), "HF_HOME": home})
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise ArmError(
            R.ARM_RAISED,
            f"Accelerate and the Trainer did not say which precision they use: exit status {done.returncode}",
            expected="one line for each question",
            seen=done.stderr.strip()[-1500:],
            next_step=" ".join(command),
        )
    return tuple(lines)


def run_program(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Raises ``subprocess.TimeoutExpired`` where there is no answer within :data:`SECONDS`."""
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS, check=False
    )


def _clean(environment: str) -> dict[str, str]:
    """The environment of the program: no ACCELERATE_ variable but the one asked about, and no GPU."""
    # The answer does not depend on the name of the test that asks, which would make each question a new one.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k != "PYTEST_CURRENT_TEST"}
    kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    # The program finds this module, and imports what this process would import.
    kept["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    return {**kept, VARIABLE: environment} if environment else kept


def precision_in(file: Path | None) -> str:
    """``mixed_precision`` of a config file, YAML or JSON; empty without it."""
    import yaml

    content = yaml.safe_load(file.read_text()) if file is not None else {}
    asked = (content or {}).get("mixed_precision", "")
    # YAML reads a bare `no` as false.
    return "no" if asked is False else str(asked)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m resolve", description=__doc__)
    parser.add_argument("--ask", action="append", choices=["", "bf16", "fp16"], help="the Trainer's own flag")
    for asked in parser.parse_args(arguments).ask or [""]:
        print(MARK + json.dumps(_inside(asked)), flush=True)
    return 0


def _inside(asked: str) -> Mapping[str, Any]:
    """What one Trainer resolves to, made as users make it, around a model of one layer."""
    gc.disable()  # imports make next to no garbage, and this process ends soon
    import torch
    from transformers import Trainer, TrainingArguments

    from pytest_fp8.backends.accelerate import forget_accelerate

    forget_accelerate()
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = TrainingArguments(
            output_dir=folder, bf16=asked == "bf16", fp16=asked == "fp16", use_cpu=True, report_to=[]
        )
        accelerator: Any = Trainer(model=torch.nn.Linear(16, 16), args=arguments).accelerator
    used = str(accelerator.mixed_precision)
    backend = str(accelerator.fp8_backend.value) if used == "fp8" else ""
    return {"arguments": asked, "process": os.environ.get(VARIABLE, ""), "used": used, "backend": backend}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
