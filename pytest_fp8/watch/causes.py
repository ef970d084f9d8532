"""Why FP8 is off, or on in part, as far as settings, sizes and filters tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_fp8.codes import W
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD
from pytest_fp8.watch.attribution import Attributed, Class, Layer, listed, stays_for
from pytest_fp8.watch.trace import Window
from pytest_fp8.watch.training import OFF, Note, Training

LAUNCHER = "ACCELERATE_MIXED_PRECISION"
OPTION_VARIABLE = "ACCELERATE_FP8_"
"""What Accelerate's variables for the options of FP8 begin with."""
NO = ("", "0", "no", "none", "false", "off", "bf16", "fp16")


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
        yield Note(
            W.COMPILED_WHILE_TIMED, "new graphs were compiled while steps were timed", "look for shapes that change"
        )


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
    lacks = device["type"] == "cpu" or tuple(device["capability"]) < (8, 9)
    if launched and state and state != "fp8":
        who = f"TrainingArguments({true[0]}=True)" if true else f"Accelerator(mixed_precision={state!r})"
        step = f"take {true[0]}=True out of the script or its arguments" if true else "leave that argument out"
        yield Note(W.OTHER_SETTING_DECIDES, f"{who} overwrites {LAUNCHER}=fp8: {state} is in force", step)
    elif lacks and (meant or state == "fp8" or (wanted and device["type"] == "cuda")):
        yield Note(
            W.NO_HARDWARE,
            f"FP8 is asked for ({(wanted or ['FP8 layers'])[0]}), and {device['name']} multiplies none",
            "a GPU of compute capability 8.9 or higher: Ada, Hopper, Blackwell",
        )
    elif wanted and not meant:
        where = "no Accelerator was made" if launched and not state else "nothing in the process acted upon it"
        yield Note(
            W.NOTHING_READ_IT,
            f"{wanted[0]} asks for FP8, and {where}",
            "make an Accelerator or a Trainer, or convert the model yourself" if launched else "see who reads it",
        )
    loaded = [name for name in training.settings("libraries") or () if name.startswith(("torchao", "transformer_e"))]
    if loaded and not meant and not launched:
        yield Note(
            W.NOTHING_CONVERTED,
            f"{loaded[0]} is loaded, and none of the {len(training.layers)} layers is its own: no conversion ran, or "
            "its filter let nothing through",
            "print what the filter answers for each name: it is given module and full name",
        )


# -- layers of FP8 whose products are not -----------------------------------------------------------------------------


def stored_or_stepped_around(training: Training, classes: Sequence[Class]) -> Iterator[Note]:
    stored = [layer for layer in training.layers if layer["dtype"].startswith("float8")]
    around, total = 0, 0
    for each in classes:
        meant = [layer for layer in each.meant() if layer not in stored]
        calls = len(each.products.get(FPROP, ())) / len(each.layers)
        total += len(meant)
        if calls and meant:
            around += max(0, round(len(meant) - each.in_fp8(FPROP) / calls))
    if stored and not any(each.in_fp8(FPROP) for each in classes):
        yield Note(
            W.STORED_ONLY,
            f"{len(stored)} weights are stored in FP8 and widened for each product: that saves memory, not time",
            "a recipe that also multiplies in FP8",
        )
    if not around:
        return
    off = sum(count for said, count in training.evidence.get("recipes", {}).items() if said == "off")
    evaluating = training.evidence.get("evaluating")
    if off:
        yield Note(
            W.SWITCHED_OFF,
            f"{off} layers of Transformer Engine ran outside autocast, or with it off"
            + (f"; the model is in eval mode ({', '.join(evaluating)})" if evaluating else ""),
            "te.autocast(enabled=True, recipe=...) around the forward pass; model.train()",
        )
    else:
        yield Note(
            W.STEPPED_AROUND,
            f"{around} of {total} FP8 layers' products ran in another precision: their forward is not called",
            "call the layer itself, not F.linear(x, layer.weight)",
        )


def converted_too_late(training: Training) -> Iterator[Note]:
    orphans = [list(shape) for shape in training.evidence.get("orphans", ())]
    lost = [
        layer
        for layer in training.layers
        if layer["trained"] and not layer["stepped"] and [layer["out"], layer["in"]] in orphans
    ]
    if lost:
        # Its default wraps the weights for FSDP2, in new parameters, and prepare() leaves the optimizer the old ones.
        wraps = training.settings("accelerate") == "fp8" and training.settings("torchao")
        gathers = "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false"
        yield Note(
            W.CONVERTED_TOO_LATE,
            f"the optimizer holds {len(orphans)} parameters that no module has, and not the weight of "
            f"{names(lost)}: these layers never learn",
            f"set {gathers}: accelerate's default wraps the weights anew"
            if wraps
            else "convert the model first, then make the optimizer",
        )


# -- on in part ---------------------------------------------------------------------------------------------------


def left(classes: Sequence[Class]) -> Iterator[Note]:
    """Layers in high precision that no size, head or adapter explains."""
    high = [layer for each in classes for layer in each.layers if each.products and not converted(each, layer)]
    unexplained = [layer for layer in high if not stays_for(layer) and not layer["fp8_layer"]]
    if unexplained:
        yield Note(
            W.LEFT_OUT,
            f"{names(unexplained)} stay in high precision though their sizes fit: a filter left them, or the "
            "conversion ended before them",
            "compare these names with the filter; accelerate's convert_model ends at the first size that does not fit",
        )


def converted(each: Class, layer: Layer) -> bool:
    """Whether a layer ran in FP8: all of its class did, or some did and it is one of FP8's own."""
    return each.share(FPROP) == 1 or (each.in_fp8(FPROP) > 0 and bool(layer["fp8_layer"]))


def roles_missing(classes: Sequence[Class]) -> Iterator[Note]:
    forward = [each for each in classes if each.in_fp8(FPROP)]
    ran = {role: sum(len(each.products.get(role, ())) for each in forward) for role in (*ROLES, RECOMPUTE)}
    quick = {role: sum(each.in_fp8(role) for each in forward) for role in (*ROLES, RECOMPUTE)}
    missing = [role for role in (DGRAD, WGRAD) if ran[role] and not quick[role]]
    if missing:
        yield Note(
            W.FORWARD_ALONE,
            f"the forward pass is in FP8, and {' and '.join(missing)} of the same layers in high precision",
            "a recipe for training, unless this one does so on purpose, as rowwise_with_gw_hp: weights quantized for "
            "inference have no backward pass in FP8",
        )
    if ran[RECOMPUTE] and quick[RECOMPUTE] < ran[RECOMPUTE] and quick[FPROP] == ran[FPROP]:
        yield Note(
            W.RECOMPUTED_OTHERWISE,
            f"{ran[RECOMPUTE] - quick[RECOMPUTE]} of {ran[RECOMPUTE]} recomputed products run in high precision",
            "open the autocast inside the checkpointed function; for Transformer Engine use its own checkpoint",
        )


def not_compiled(training: Training, window: Window, classes: Sequence[Class]) -> Iterator[Note]:
    """torchao's casts are kernels of their own where nothing fuses them. Emulation is not meant to be fast."""
    if training.emulated or not training.settings("torchao"):
        return
    total = sum(each.in_fp8(role) for each in classes for role in (*ROLES, RECOMPUTE))
    if window.compiled < total:
        which = "none" if not window.compiled else f"{window.compiled} of {total}"
        yield Note(
            W.NOT_COMPILED,
            f"{which} of the FP8 products ran inside a compiled region: each cast is a kernel of its own",
            "torch.compile(model), without torch.compiler.disable on its layers",
        )


def names(layers: Sequence[Layer]) -> str:
    return listed(layer["name"] for layer in layers)
