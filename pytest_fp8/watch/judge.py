"""From the evidence of one training to its verdict: ON, OFF or UNKNOWN, and what explains it.

OFF needs positive proof: products of the layers were seen, and none of them in FP8. Whatever could not be seen is
UNKNOWN, with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_fp8.codes import W
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.watch.attribution import attribute
from pytest_fp8.watch.causes import notes_of
from pytest_fp8.watch.trace import FP8_KERNEL, Window, read_window
from pytest_fp8.watch.training import OFF, ON, Training

RUN_LONGER = "run more steps, or set FP8_WATCH_STEPS=3 to time fewer"


UNSEEN = {
    "steps not recognised": (
        W.NO_STEPS,
        "its optimizers are called in no order that repeats",
        "watch a script whose steps call their optimizers in one order",
    ),
    "steps inside the backward pass": (
        W.NO_STEPS,
        "its optimizers step inside the backward pass, where no profile can begin",
        "watch it once with its optimizer's step after the backward pass",
    ),
    "profiles itself": (
        W.PROFILES_ITSELF,
        "the script has a profiler of its own, and a second one would empty it",
        "run it once without its profiler",
    ),
}
"""Why the observer ended without a profile -> code, sentence and next step."""


def judge(evidence: Mapping[str, Any]) -> Training:
    training = Training(evidence)
    reason, _, said = str(evidence["reason"]).partition(": ")
    if reason in UNSEEN:
        return training.unknown(*UNSEEN[reason])
    if reason == "unsupported":
        return training.unknown(W.UNSUPPORTED, f"{said} is older than Python 3.11 with torch 2.11", "update them")
    if reason == "too short":
        return training.unknown(W.TOO_SHORT, f"the script ended after {said} needed", RUN_LONGER)
    if reason or not evidence.get("events"):
        said = evidence["reason"] or "the profile is empty"
        return training.unknown(W.NOT_OBSERVED, said, "watch a run that ends by itself")
    return judged(training, read_window(evidence["events"]))


def judged(training: Training, window: Window) -> Training:
    """The verdict on a profiled step."""
    training.window = window
    found = training.found = attribute(window.products, training.layers)
    total = sum(product.flops for product in found.counted)
    again = "please report this script's way of training"
    if not window.backward_passes:
        return training.unknown(W.NO_STEPS, "the profiled step held no backward pass", again)
    strange = [kernel.name for kernel in window.loose if FP8_KERNEL.search(kernel.name)]
    in_fp8 = sum(product.flops for product in found.counted if product.kind == FP8)
    if strange and not in_fp8:
        said = f"FP8 kernels ran outside the operators that are known ({strange[0]})"
        return training.unknown(W.NO_PRODUCTS, said, "without CUDA graphs their sizes are seen: turn them off once")
    if not total or not found.classes:
        said = "no matrix product of a layer was seen in the profiled step"
        return training.unknown(W.NO_PRODUCTS, said, "without CUDA graphs they are seen: turn them off once")
    if not in_fp8 and any(config.get("emulate") == "True" for config in training.settings("torchao") or ()):
        said = "FP8 is emulated inside compiled code, which leaves no trace of the FP8 values"
        return training.unknown(W.NO_PRODUCTS, said, "watch it uncompiled, or on a GPU")
    training.share = in_fp8 / total
    training.verdict = ON if in_fp8 else OFF
    training.code = None if in_fp8 else W.FP8_OFF
    training.notes = list(notes_of(training, window, found))
    return training
