"""``pytest-fp8 doctor``: what this machine can do for FP8 training, and what is in its way. No torch here."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.environment import arm_env
from pytest_fp8.arms.scratch import temporary_folder
from pytest_fp8.codes import Code, R
from pytest_fp8.gpu import Gpu
from pytest_fp8.libraries import library_versions, wanted
from pytest_fp8.recipes import types, unmet_need

DESCRIPTION = """\
Say what this machine can do for FP8 training: GPU, libraries and whether they can be imported, recipes. Nothing is
computed: that FP8 runs and is right, tests say. Exit 0: nothing is in the way; 1: something is.
"""
LIBRARIES = ("pytest-fp8", "torch", "transformers", "torchao", "transformer-engine", "accelerate", "peft", "unsloth")
NEEDED = ("torch", "transformers")
IMPORTED = ("torchao", "transformer_engine")
IMPORT = "import sys; from pytest_fp8.backends import backend; backend(sys.argv[1]).import_library()"
SECONDS = 180


@dataclass(frozen=True)
class Line:
    """``code``: of a problem, which gives exit code 1."""

    topic: str
    text: str
    code: Code | None = None
    next_step: str = ""


def add_doctor(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    commands.add_parser("doctor", help="what this machine can do", description=DESCRIPTION).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    problems = 0
    for line in findings():
        print(f"{line.topic:<10} {f'{line.code}: ' if line.code else ''}{line.text}")
        if line.next_step:
            print(f"{'':<11}next: {line.next_step}")
        problems += line.code is not None
    print(f"\n{problems} problem(s)" if problems else "\nno problems")
    return int(problems > 0)


def findings() -> Iterator[Line]:
    """Everything, in the order in which a person would look."""
    gpu, absent = gpus.detect()
    yield Line("machine", f"Python {platform.python_version()}, {platform.platform()}")
    yield gpu_line(gpu, absent)
    yield from library_lines()
    yield from recipe_lines(gpu)
    for kind in types():
        name = kind.name
        if name in IMPORTED and kind().available()[0] and (why := not_imported(name)):
            yield Line("libraries", why, R.NOT_INSTALLED, f"install {name} anew, built for the torch that is here")


def not_imported(name: str) -> str:
    """Why the library of a backend cannot be imported as an arm imports it; empty where it can. One that was built for
    another torch is there, and cannot."""
    command, said = [sys.executable, "-c", IMPORT, name], [f"no answer in {SECONDS} s"]
    with temporary_folder("doctor-") as folder, suppress(subprocess.TimeoutExpired):
        env = arm_env(name, folder)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
        if not done.returncode:
            return ""
        said = [f"exited with {done.returncode}", *done.stderr.strip().splitlines()]
    return f"{name} cannot be imported: {said[-1]}"


def gpu_line(gpu: Gpu | None, absent: str) -> Line:
    if gpu is None:
        runs = "Cases with emulated=True run on the CPU: layers, numerics, loss, checkpoints; never speed or memory"
        return Line("GPU", f"{absent}. {runs}")
    capability = ".".join(map(str, gpu.capability))
    text = f"{gpu.name}, driver {gpu.driver}, compute capability {capability}, {gpu.memory / 2**30:.1f} GiB"
    if gpu.chip:
        return Line("GPU", f"{text}; {gpu.chip}: --fp8-gpu={gpu.key}")
    return Line("GPU", f"{text}: no FP8 tensor cores", R.NO_FP8_HARDWARE, "an Ada, Hopper or Blackwell GPU")


def library_lines() -> Iterator[Line]:
    versions = library_versions(LIBRARIES)
    yield Line("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for package in NEEDED:
        if package not in versions:
            yield Line("libraries", f"{package} is not installed", R.NOT_INSTALLED, f"pip install {wanted(package)}")


def recipe_lines(gpu: Gpu | None) -> Iterator[Line]:
    """Of each backend the recipes that run here, and why others do not: its library is not there or too old, or the
    GPU has not what a recipe needs."""
    usable = False
    for kind in types():
        recipes = [facts.name for facts in kind.recipes if facts.roles]
        if not recipes:
            continue
        installed, reason = kind().available()
        emulates = gpu is None and kind.emulates
        needs = {recipe: unmet_need(kind.name, recipe, gpu.capability) for recipe in recipes} if gpu else {}
        runs = [recipe for recipe in recipes if emulates or (gpu and not needs[recipe])]
        usable |= bool(installed and (runs or gpu is None))
        lacking = "".join(f"; {recipe} {need}" for recipe, need in needs.items() if need)
        told = f"{', '.join(runs) or 'none'}{', emulated on the CPU' if emulates else ''}{lacking}"
        yield Line("recipes", f"{kind.name}: {told if installed else reason}")
    if not usable:
        yield Line("recipes", "nothing here computes in FP8", R.NOT_INSTALLED, f"pip install {wanted('torchao')}")
