"""Asks Accelerate and the Trainer which mixed precision they resolve to; trains nothing and needs no GPU.

:func:`resolve` starts the program below in a process of its own, with ``accelerate launch`` where a launch or a config
file is asked for. By hand: ``accelerate launch --config_file fp8.yaml -m pytest_fp8.resolve``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fp8.errors import ArmError
from pytest_fp8.questions.precision import VARIABLE, Switches

SECONDS = 180
MARK = "pytest-fp8 resolved: "


def resolve(
    environment: str = "", config_file: Path | None = None, launch: bool = False, asked: Sequence[str] = ("", "bf16")
) -> list[Switches]:
    """What is trained in for each of ``asked`` (``bf16``: ``TrainingArguments(bf16=True)``; empty: neither flag).

    ``environment`` is ACCELERATE_MIXED_PRECISION outside. No default config of this machine is read, and no other of
    its ACCELERATE_ variables. What was answered once is remembered while nothing that matters is another. Raises
    :class:`ArmError` where the program fails, with its last words.
    """
    launched = launch or config_file is not None
    program = ["-m", "pytest_fp8.resolve", *(f"--ask={what}" for what in asked)]
    command = [sys.executable, *program]
    if launched:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
        command += [f"--config_file={config_file}", *program] if config_file is not None else program
    content = config_file.read_bytes() if config_file is not None else b""
    lines = _answers(tuple(command), tuple(sorted(_clean(environment).items())), os.getcwd(), content)
    outside = {"environment": environment, "launched": launched, "config_file": _precision_of(config_file)}
    return [Switches.from_json({**json.loads(line), **outside}) for line in lines]


@functools.cache
def _answers(
    command: tuple[str, ...], environment: tuple[tuple[str, str], ...], folder: str, content: bytes
) -> tuple[str, ...]:
    """What the program printed, without its mark. ``folder``, where it is started, and ``content``, that of the config
    file, are there to be told apart by; an exception is never remembered."""
    with tempfile.TemporaryDirectory() as home:
        done = _run(list(command), {**dict(environment), "HF_HOME": home})
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise ArmError(
            "raised",
            f"the precision could not be asked for: exit status {done.returncode}",
            expected="one answer a question",
            seen=done.stderr.strip()[-1500:],
            next_step=" ".join(command),
        )
    return tuple(lines)


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a session of its own, so that what ``accelerate launch`` starts ends with it. Raises :class:`ArmError`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True, stdin=subprocess.DEVNULL
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise ArmError(
            "hung",
            f"the precision could not be asked for: no answer in {SECONDS} s",
            expected="one answer a question",
            seen="nothing",
            cause="a machine too busy, or a launcher that waits for something",
            next_step=" ".join(command),
        ) from late
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _clean(environment: str) -> dict[str, str]:
    # The name of the test that asks is another one each time, and nothing that the answer depends on.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_") and k != "PYTEST_CURRENT_TEST"}
    root = str(Path(__file__).parents[1])
    kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    kept["PYTHONPATH"] = os.pathsep.join(part for part in (root, kept.get("PYTHONPATH", "")) if part)
    return {**kept, VARIABLE: environment} if environment else kept


def _precision_of(file: Path | None) -> str:
    """``mixed_precision`` of a config file, YAML or JSON; only this one line of it is wanted."""
    if file is None:
        return ""
    for line in file.read_text().splitlines():
        key, _, value = line.strip().strip("{},").partition(":")
        if key.strip("\"' ") == "mixed_precision":
            return value.split("#")[0].strip("\"', ")
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pytest_fp8.resolve", description=__doc__)
    parser.add_argument("--ask", action="append", choices=["", "bf16", "fp16"], help="the Trainer's own flag")
    for asked in parser.parse_args(arguments).ask or [""]:
        print(MARK + json.dumps(_inside(asked)), flush=True)
    return 0


def _inside(asked: str) -> Mapping[str, Any]:
    """One Trainer, made as users make it, around a model of one layer."""
    gc.disable()  # importing makes next to no garbage, and this process is about to end
    import torch
    from transformers import Trainer, TrainingArguments

    from pytest_fp8.backends.accelerate_state import forget_accelerate

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
