"""One real FP8 product in each library, in a process of its own with the environment of an arm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from pytest_fp8.arms.env import arm_env
from pytest_fp8.arms.scratch import temporary_folder
from pytest_fp8.codes import R
from pytest_fp8.doctor.line import OK, Line, problem
from pytest_fp8.gpu import Gpu

RECIPES = {"torchao": "tensorwise", "transformer_engine": "current"}
"""Library -> the recipe that is tried: one scale for a tensor, and no history to fill first."""
LEAST, MOST = 0.01, 0.1
"""Bounds of the error of an FP8 product of normal numbers, as a fraction. Measured on a CPU, 256 x 256 x 256, one seed:
3.8% in FP8 (torchao, emulated), 0.17% in BF16, whose numbers the operands are."""
SECONDS = 180


def product_findings(gpu: Gpu | None) -> Iterator[Line]:
    from pytest_fp8.backends import backend

    for name, recipe in RECIPES.items():
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
