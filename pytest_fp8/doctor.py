"""``pytest-fp8 doctor``: what this machine can do for FP8 training, and what is in its way. No torch here."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_fp8 import gpu as gpus
from pytest_fp8.arms.environment import arm_env
from pytest_fp8.arms.scratch import temporary_folder
from pytest_fp8.codes import Code, R
from pytest_fp8.gpu import Gpu
from pytest_fp8.libraries import library_versions, requirements, wanted
from pytest_fp8.recipes import unmet_need

DESCRIPTION = """\
Say what this machine can do for FP8 training: GPU, recipes, libraries, clocks and neighbours, and one real FP8
product in each library. Exit 0: nothing is in the way; 1: something is.
"""
LIBRARIES = ("torch", "transformers", "torchao", "transformer-engine", "accelerate", "peft", "unsloth")
NEEDED = ("torch", "transformers")
TRIED = {"torchao": "tensorwise", "transformer_engine": "current"}
"""Library -> the recipe that is tried: one scale for a tensor, and no history to fill first."""
LEAST, MOST = 0.01, 0.1
"""Bounds of the error of an FP8 product of normal numbers, as a fraction. Measured on a CPU, 256 x 256 x 256, one seed:
3.8% in FP8 (torchao, emulated), 0.17% in BF16, whose numbers the operands are."""
SECONDS = 180
OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Line:
    """``state``: ``ok``, ``note`` (nothing fails, and a person should know) or ``problem`` (exit code 1), which has a
    code."""

    topic: str
    state: str
    text: str
    next_step: str = ""
    code: Code | None = None


def problem(code: Code, topic: str, text: str, next_step: str) -> Line:
    return Line(topic, PROBLEM, text, next_step, code)


def add_doctor(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    commands.add_parser("doctor", help="what this machine can do", description=DESCRIPTION).set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = list(findings())
    problems = sum(finding.state == PROBLEM for finding in found)
    print("\n".join(lines_of(found)))
    print(f"\n{problems} problem(s)" if problems else "\nno problems")
    return int(problems > 0)


def lines_of(found: Sequence[Line]) -> Iterator[str]:
    """The findings as text. Several may have the same next step, which is said once."""
    topic, told = "", set()
    for finding in found:
        said = f"{finding.code}: {finding.text}" if finding.code else finding.text
        yield f"{'' if finding.topic == topic else finding.topic:<11} {finding.state:<8} {said}"
        if finding.next_step and finding.state != OK and finding.next_step not in told:
            yield f"{'':<21}next: {finding.next_step}"
            told.add(finding.next_step)
        topic = finding.topic


def findings() -> Iterator[Line]:
    """Everything, in the order in which a person would look."""
    version = library_versions(["pytest-fp8"]).get("pytest-fp8", "(not installed)")
    yield Line("machine", OK, f"pytest-fp8 {version}, Python {platform.python_version()}, {platform.platform()}")
    gpu, absent = gpus.detect()
    yield gpu_finding(gpu, absent)
    yield from condition_findings(gpu) if gpu else ()
    yield from library_findings()
    yield from recipe_findings(gpu)
    if gpu is None or gpu.chip:
        yield from product_findings(gpu)


def gpu_finding(gpu: Gpu | None, absent: str) -> Line:
    if gpu is None:
        runs = "Cases with emulated=True run on the CPU: layers, numerics, loss, checkpoints; never speed or memory"
        return Line("GPU", NOTE, f"{absent}. {runs}")
    capability = ".".join(map(str, gpu.capability))
    text = f"{gpu.name}, driver {gpu.driver}, compute capability {capability}, {gpu.memory / 2**30:.1f} GiB"
    text += f", power limit {gpu.power_limit:.0f} W" if gpu.power_limit else ""
    if gpu.chip:
        return Line("GPU", OK, f"{text}; {gpu.chip}: --fp8-gpu={gpu.key}")
    return problem(R.NO_FP8_HARDWARE, "GPU", f"{text}: no FP8 tensor cores", "an Ada, Hopper or Blackwell GPU")


def condition_findings(gpu: Gpu) -> Iterator[Line]:
    """Clocks and neighbours, which decide what a timing is worth."""
    seen = gpus.conditions(gpu, set(), 0)
    if gpus.CLOCKS in seen.unknown:
        yield Line("clocks", NOTE, "the driver does not tell of them: speeds are judged without", "")
    elif seen.throttles:
        text = f"{seen.clock} MHz now, throttled: {', '.join(seen.throttles)}"
        yield problem(R.THROTTLED, "clocks", text, "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER: speeds are INVALID")
    else:
        yield Line("clocks", OK, f"{seen.clock} MHz now, not throttled")
    if gpus.NEIGHBOURS in seen.unknown:
        yield Line("neighbours", NOTE, "the driver does not tell of other processes: nobody else may use the GPU", "")
    elif seen.strangers:
        text = f"{len(seen.strangers)} other process(es) hold memory of this GPU"
        yield problem(R.NEIGHBOURS, "neighbours", text, "nvidia-smi shows them; speeds beside them are INVALID")
    else:
        yield Line("neighbours", OK, "no other process on this GPU")


def recipe_findings(gpu: Gpu | None) -> Iterator[Line]:
    """For each backend whose library is here: the recipes that run, and why others do not."""
    from pytest_fp8.recipes import types

    for kind in types():
        if not any(facts.roles for facts in kind.recipes):
            continue
        (installed, reason), name = kind().available(), kind.name
        recipes = [facts.name for facts in kind.recipes]
        if not installed:
            why, colon, package = reason.partition(": pip install ")
            yield Line("recipes", NOTE, f"{name}: {why}", f"pip install {package}" if colon else "")
        elif gpu is None or not gpu.chip:
            emulated = kind.emulates
            yield Line(
                "recipes",
                OK if emulated else NOTE,
                f"{name}: {', '.join(recipes)}, emulated on the CPU" if emulated else f"{name}: needs a GPU with FP8",
            )
        else:
            needs = {recipe: unmet_need(name, recipe, gpu.capability) for recipe in recipes}
            runs = ", ".join(recipe for recipe, need in needs.items() if not need) or "none"
            lacking = "".join(f"; {recipe} {need}" for recipe, need in needs.items() if need)
            yield Line("recipes", OK if runs != "none" else NOTE, f"{name}: {runs}{lacking}")


def library_findings() -> Iterator[Line]:
    from packaging.requirements import Requirement

    versions, asked = library_versions(LIBRARIES), requirements()
    for package in LIBRARIES:
        found, bound = versions.get(package), Requirement(asked.get(package, package)).specifier
        if found is None:
            state, code = (PROBLEM, R.NOT_INSTALLED) if package in NEEDED else (NOTE, None)
            yield Line("libraries", state, f"{package} is not installed", f"pip install {wanted(package)}", code)
        elif not bound.contains(found, prereleases=True):
            text = f"{package} {found} is older than this plugin takes ({bound})"
            yield problem(R.OLD_LIBRARY, "libraries", text, f"pip install {wanted(package)}")
        else:
            yield Line("libraries", OK, f"{package} {found}")
    if "torchao" not in versions and "transformer-engine" not in versions:
        text = "neither torchao nor Transformer Engine is installed: nothing here computes in FP8"
        yield problem(R.NOT_INSTALLED, "libraries", text, f"pip install {wanted('torchao')}")


def product_findings(gpu: Gpu | None) -> Iterator[Line]:
    from pytest_fp8.backends import backend

    for name, recipe in TRIED.items():
        if backend(name).available()[0] and (gpu is not None or name == "torchao"):
            yield judged(name, recipe, tried(name, recipe, emulated=gpu is None))


def tried(name: str, recipe: str, emulated: bool) -> dict[str, Any]:
    """What :mod:`pytest_fp8.worker.known_product` says, or ``error`` with the reason."""
    command = [sys.executable, "-m", "pytest_fp8.worker.known_product", name, recipe, *(["emulated"] * emulated)]
    try:
        with temporary_folder("doctor-") as folder:
            done = subprocess.run(
                command,
                env=arm_env(name, folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {SECONDS} s"}
    try:
        # Libraries print as well; the answer is the last line.
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "nothing was said")
        return {"error": f"exited with {done.returncode}: {last[:300]}"}
    return answer


def judged(name: str, recipe: str, answer: dict[str, Any]) -> Line:
    what = f"{name} {recipe}"
    if "error" in answer:
        step = f"python -m pytest_fp8.worker.known_product {name} {recipe}"
        return problem(R.WRONG_PRODUCT, "products", f"{what}: {answer['error']}", step)
    cudnn = f", cuDNN {answer['cudnn']}" if answer["cudnn"] else ""
    text = f"{what}: {answer['off']:.1%} off the exact product, by {answer['kernel']}{cudnn}"
    if LEAST <= answer["off"] <= MOST:
        return Line("products", OK, text)
    why = "as exact as BF16: it did not run in FP8" if answer["off"] < LEAST else "wrong, even for FP8"
    step = "pytest-fp8 suites -m core says which layers and kernels ran"
    return problem(R.WRONG_PRODUCT, "products", f"{text}: {why}", step)
