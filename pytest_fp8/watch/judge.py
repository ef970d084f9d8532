"""From the evidence of one process to its verdict, ON, OFF or UNKNOWN, and what explains it.

OFF needs positive proof: products of the layers were seen, and none of them in FP8. Whatever could not be seen is
UNKNOWN, with its reason. A code's page has the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fp8.codes import W
from pytest_fp8.questions.findings import some
from pytest_fp8.questions.layers.products import FP8
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD
from pytest_fp8.watch.attribution import Attributed, Class, Layer, attribute, stays_for
from pytest_fp8.watch.trace import FP8_KERNEL, Window, read_window

ON, OFF, UNKNOWN = "ON", "OFF", "UNKNOWN"
LAUNCHER = "ACCELERATE_MIXED_PRECISION"
OPTION_VARIABLE = "ACCELERATE_FP8_"
"""What Accelerate's variables for the options of FP8 begin with."""
EMULATES = "emulate=True"
"""In what torchao's configuration says of itself."""
NO = ("", "0", "no", "none", "false", "off", "bf16", "fp16")


@dataclass(frozen=True)
class Note:
    """One thing that explains a verdict, or that a person should know."""

    code: W
    text: str

    @property
    def next_step(self) -> str:
        return self.code.page.instead


@dataclass
class Training:
    """What one process of a training showed. ``window`` and ``found`` are there where its step was profiled."""

    evidence: Mapping[str, Any]
    verdict: str = UNKNOWN
    why: Note | None = None
    """Of UNKNOWN and OFF."""
    share: float | None = None
    """Of the FLOPs of the layers' products and of products of no layer, those in FP8."""
    window: Window | None = None
    found: Attributed | None = None
    notes: list[Note] = field(default_factory=list)

    @property
    def emulated(self) -> bool:
        return self.window is not None and self.window.emulated > 0

    def settings(self, name: str) -> Any:
        return self.evidence.get("settings", {}).get(name)

    @property
    def layers(self) -> Sequence[Mapping[str, Any]]:
        return list(self.evidence.get("layers", ()))

    def ran(self) -> Sequence[Mapping[str, Any]]:
        """The layers that took part in the profiled step: with a gradient, or frozen. All, where another optimizer's
        step may have cleared gradients, or none are seen, as where they are sharded away."""
        seen = self.evidence.get("optimizers_a_step") == 1 and any(layer["gradient"] for layer in self.layers)
        return [layer for layer in self.layers if not seen or layer["gradient"] or not layer["trained"]]

    def unknown(self, code: W, reason: str) -> Training:
        self.why = Note(code, reason)
        return self


def judge(evidence: Mapping[str, Any]) -> Training:
    """A fault in the reading is said, and takes neither report nor exit code from the script."""
    training = Training(evidence)
    if evidence["code"]:
        return training.unknown(W(evidence["code"]), evidence["reason"])
    if not evidence["events"]:
        return training.unknown(W.NOT_OBSERVED, "the profile is empty")
    try:
        return judged(training, read_window(evidence["events"]))
    except Exception as error:
        return Training(evidence).unknown(W.NOT_OBSERVED, f"its evidence was not understood: {error!r}")


def judged(training: Training, window: Window) -> Training:
    """The verdict on a profiled step."""
    training.window = window
    found = training.found = attribute(window.products, training.ran())
    total = sum(product.flops for product in found.counted)
    if not window.backward_passes:
        return training.unknown(W.NO_STEPS, "the profiled step held no backward pass")
    strange = [kernel.name for kernel in window.loose if FP8_KERNEL.search(kernel.name)]
    in_fp8 = sum(product.flops for product in found.counted if product.kind == FP8)
    if strange and not in_fp8:
        said = f"FP8 kernels ran outside the operators that are known ({strange[0]})"
        return training.unknown(W.NO_PRODUCTS, said)
    if not total or not found.classes:
        return training.unknown(W.NO_PRODUCTS, "no matrix product of a layer was seen in the profiled step")
    meant = sum(layer["fp8_layer"] for layer in training.layers)
    if meant and not in_fp8 and not any(layer["fp8_layer"] for layer in training.ran()):
        return training.unknown(W.NO_PRODUCTS, f"none of the {meant} FP8 layers took part in the profiled step")
    if not in_fp8 and window.compiles and any(EMULATES in config for config in training.settings("torchao") or ()):
        said = "FP8 is emulated inside compiled code, which leaves no trace of the FP8 values"
        return training.unknown(W.NO_PRODUCTS, said)
    training.share = in_fp8 / total
    training.verdict = ON if in_fp8 else OFF
    training.why = None if in_fp8 else Note(W.FP8_OFF, "products of the layers were seen, and none in FP8")
    training.notes = list(notes_of(training, window, found))
    return training


def notes_of(training: Training, window: Window, found: Attributed) -> Iterator[Note]:
    classes = found.classes
    if training.verdict == OFF:
        found_off = list(off_by_settings(training))
        yield from found_off
        if any(note.code == W.NO_HARDWARE for note in found_off):
            return
    yield from stored_or_stepped_around(training, classes)
    yield from converted_too_late(training)
    if training.verdict != OFF:
        yield from left(classes)
        yield from roles_missing(classes)
        yield from not_compiled(training, window, classes)
    if training.evidence.get("compiled_while_timed"):
        yield Note(W.COMPILED_WHILE_TIMED, "new graphs were compiled while steps were timed")


# -- off ----------------------------------------------------------------------------------------------------------


def asked(training: Training) -> list[str]:
    """Where FP8 is asked for: ``NAME=value`` of the environment, arguments of the command line, accelerate's state."""
    held = training.evidence.get("environment", {}).items()
    environment = [f"{name}={value}" for name, value in held if on(value) and not name.startswith(OPTION_VARIABLE)]
    words = training.evidence.get("arguments", [])
    named = [word for word, following in zip(words, [*words[1:], ""], strict=False) if asks(word, following)]
    return [*environment, *named]


def asks(word: str, following: str) -> bool:
    """Whether an argument asks for FP8, as ``--fp8`` and ``--precision=fp8`` do; not ``--fp8 0`` and ``--no-fp8``."""
    name, _, value = word.lower().partition("=")
    if "fp8" not in f"{name}={value}" or "/" in word or name.endswith(".py") or name.lstrip("-").startswith("no"):
        return False
    given = value or ("" if following.startswith("-") or not name.startswith("-") else following)
    return not given or on(given)


def on(value: str) -> bool:
    return value.strip().lower() not in NO


def off_by_settings(training: Training) -> Iterator[Note]:
    environment, state = training.evidence.get("environment", {}), training.settings("accelerate")
    true, wanted = training.settings("arguments"), asked(training)
    meant = [layer for layer in training.layers if layer["fp8_layer"]]
    device = training.evidence["device"]
    launched = environment.get(LAUNCHER, "").lower() == "fp8"
    # A CPU multiplies FP8, slowly.
    lacks = device["type"] == "cuda" and tuple(device["capability"]) < (8, 9)
    if launched and state and state != "fp8":
        who = f"TrainingArguments({true[0]}=True)" if true else f"Accelerator(mixed_precision={state!r})"
        yield Note(W.OTHER_SETTING_DECIDES, f"{who} overwrites {LAUNCHER}=fp8: {state} is in force")
    elif lacks and (meant or state == "fp8" or wanted):
        what = (wanted or ["FP8 layers"])[0]
        yield Note(W.NO_HARDWARE, f"FP8 is asked for ({what}), and {device['name']} multiplies none")
    elif wanted and not meant:
        where = "no Accelerator was made" if launched and not state else "nothing in the process acted upon it"
        yield Note(W.NOTHING_READ_IT, f"{wanted[0]} asks for FP8, and {where}")
    loaded = [name for name in training.settings("libraries") or () if name.startswith(("torchao", "transformer_e"))]
    if loaded and not meant and not launched:
        said = "no conversion ran, its filter let nothing through, or another model was converted"
        layers = f"none of the {len(training.layers)} layers is its own"
        yield Note(W.NOTHING_CONVERTED, f"{loaded[0]} is loaded, and {layers}: {said}")


# -- layers of FP8 whose products are not -----------------------------------------------------------------------------


def stored_or_stepped_around(training: Training, classes: Sequence[Class]) -> Iterator[Note]:
    stored = [layer for layer in training.layers if layer["dtype"].startswith("float8")]
    around, total = 0, 0
    for each in classes:
        meant = [layer for layer in each.meant() if layer not in stored]
        calls = len(each.products.get(FPROP, ())) / len(each.layers)
        total += len(meant)
        if calls and meant:
            around += max(0, round(min(len(meant) - each.in_fp8(FPROP) / calls, in_backward(each) / calls)))
    if stored and not any(each.in_fp8(FPROP) for each in classes):
        said = "weights are stored in FP8 and widened for each product: that saves memory, not time"
        yield Note(W.STORED_ONLY, f"{len(stored)} {said}")
    if not around:
        return
    off = sum(count for said, count in training.evidence.get("recipes", {}).items() if said == "off")
    if off:
        evaluating = training.evidence.get("evaluating")
        mode = f"; the model is in eval mode ({', '.join(evaluating)})" if evaluating else ""
        yield Note(W.SWITCHED_OFF, f"{off} layers of Transformer Engine ran outside autocast, or with it off{mode}")
    else:
        said = "FP8 layers' products ran in another precision: their forward is not called, or falls back"
        learns = "" if any(layer["gradient"] for layer in training.layers) else "; none of their weights has a gradient"
        yield Note(W.STEPPED_AROUND, f"{around} of {total} {said}{learns}")


def in_backward(each: Class) -> float:
    """Products of a class in high precision that a backward pass holds. A model that only evaluates beside the one that
    trains, as a teacher of the same sizes, leaves none. Infinite where the recipe itself keeps both roles."""
    told = [role for role in (DGRAD, WGRAD) if each.in_fp8(role) or not each.in_fp8(FPROP)]
    return max((len(each.products.get(role, ())) - each.in_fp8(role) for role in told), default=math.inf)


def converted_too_late(training: Training) -> Iterator[Note]:
    orphans = [list(shape) for shape in training.evidence.get("orphans", ())]
    lost = [
        layer
        for layer in training.layers
        if layer["trained"] and not layer["stepped"] and [layer["out"], layer["in"]] in orphans
    ]
    if lost:
        yield Note(
            W.CONVERTED_TOO_LATE,
            f"the optimizer holds {len(orphans)} parameters that no module has, and not the weight of "
            f"{names(lost)}: these layers never learn",
        )


# -- on in part ---------------------------------------------------------------------------------------------------


def left(classes: Sequence[Class]) -> Iterator[Note]:
    """Layers in high precision that no size, head or adapter explains."""
    high = [layer for each in classes for layer in each.layers if each.products and not converted(each, layer)]
    unexplained = [layer for layer in high if not stays_for(layer) and not layer["fp8_layer"]]
    if unexplained:
        said = "stay in high precision though their sizes fit: a filter left them, or the conversion ended before them"
        yield Note(W.LEFT_OUT, f"{names(unexplained)} {said}")


def converted(each: Class, layer: Layer) -> bool:
    """Whether a layer ran in FP8: all of its class did, or some did and it is one of FP8's own."""
    return each.share(FPROP) == 1 or (each.in_fp8(FPROP) > 0 and bool(layer["fp8_layer"]))


def roles_missing(classes: Sequence[Class]) -> Iterator[Note]:
    forward = [each for each in classes if each.in_fp8(FPROP)]
    ran = {role: sum(len(each.products.get(role, ())) for each in forward) for role in (*ROLES, RECOMPUTE)}
    quick = {role: sum(each.in_fp8(role) for each in forward) for role in (*ROLES, RECOMPUTE)}
    missing = [role for role in (DGRAD, WGRAD) if ran[role] and not quick[role]]
    if missing:
        said = f"the forward pass is in FP8, and {' and '.join(missing)} of the same layers in high precision"
        yield Note(W.FORWARD_ALONE, said)
    if ran[RECOMPUTE] and quick[RECOMPUTE] < ran[RECOMPUTE] and quick[FPROP] == ran[FPROP]:
        said = f"{ran[RECOMPUTE] - quick[RECOMPUTE]} of {ran[RECOMPUTE]} recomputed products run in high precision"
        yield Note(W.RECOMPUTED_OTHERWISE, said)


def not_compiled(training: Training, window: Window, classes: Sequence[Class]) -> Iterator[Note]:
    """torchao's casts are kernels of their own where nothing fuses them. Emulation is not meant to be fast."""
    if training.emulated or not training.settings("torchao"):
        return
    total = sum(each.in_fp8(role) for each in classes for role in (*ROLES, RECOMPUTE))
    if window.compiled < total:
        which = "none" if not window.compiled else f"{window.compiled} of {total}"
        said = "of the FP8 products ran inside a compiled region: each cast is a kernel of its own"
        yield Note(W.NOT_COMPILED, f"{which} {said}")


def names(layers: Sequence[Layer]) -> str:
    return some([layer["name"] for layer in layers])
