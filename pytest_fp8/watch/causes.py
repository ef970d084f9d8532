"""Why FP8 is off, or on in part, as far as settings, sizes and filters tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pytest_fp8.codes import W
from pytest_fp8.recipes import DGRAD, FPROP, RECOMPUTE, ROLES, WGRAD, recipe_facts
from pytest_fp8.watch.attribution import Attributed, Class, Layer, attribute, listed, odd, stays_for
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
        yield from evaluated_otherwise(training, window, classes)
        yield from not_compiled(training, window, classes)
    adapters = [each for each in classes if all(layer["adapter"] for layer in each.layers)]
    if training.verdict != OFF and adapters:
        count = sum(len(each.layers) for each in adapters)
        share = sum(each.flops for each in adapters) / max(1, sum(product.flops for product in found.counted))
        said = f"{count} weights of adapters in high precision, {share:.1%} of the FLOPs: expected"
        yield Note(W.ADAPTERS, f"{said}. {frozen_base(classes)}")
    yield from options_dropped(training)
    if training.evidence.get("compiled_while_timed"):
        yield Note(
            W.COMPILED_WHILE_TIMED, "new graphs were compiled while steps were timed", "look for shapes that change"
        )


def frozen_base(classes: Sequence[Class]) -> str:
    frozen = [each for each in classes if not any(layer["trained"] for layer in each.layers)]
    if any(each.products.get(WGRAD) for each in frozen):
        return "The base is frozen, and its wgrad is computed all the same: uncompiled, torchao does so"
    return "The frozen base has no wgrad, so that FP8 earns less than in full training"


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
    layers = [layer for each in classes for layer in each.layers]
    high = [layer for each in classes for layer in each.layers if each.products and not converted(each, layer)]
    unexplained = [layer for layer in high if not stays_for(layer) and not layer["fp8_layer"]]
    if not unexplained:
        return
    stop = [first_odd(layer, layers) for layer in unexplained]
    before = [layer for layer in stop if layer is not None]
    if len(before) == len(stop) and before:
        yield Note(
            W.STOPPED_EARLY,
            f"{names(unexplained)} stay in high precision though their sizes fit; each comes after {before[0]['name']} "
            f"({stays_for(before[0])}), where the conversion ended",
            "a conversion that goes on to the next layer; accelerate's convert_model returns at the first such size",
        )
    else:
        yield Note(
            W.LEFT_OUT,
            f"{names(unexplained)} stay in high precision though their sizes fit: a filter or the conversion left them",
            "compare these names with the filter",
        )


def converted(each: Class, layer: Layer) -> bool:
    """Whether a layer ran in FP8: all of its class did, or some did and it is one of FP8's own."""
    return each.share(FPROP) == 1 or (each.in_fp8(FPROP) > 0 and bool(layer["fp8_layer"]))


def first_odd(layer: Layer, layers: Sequence[Layer]) -> Layer | None:
    """A layer of odd sizes before this one, in the same module."""
    mine = [other for other in layers if other["parent"] == layer["parent"]]
    order = {other["name"]: other["order"] for other in mine}
    before = [other for other in mine if odd(other) and order[other["name"]] < order[layer["name"]]]
    return before[0] if before else None


def roles_missing(classes: Sequence[Class]) -> Iterator[Note]:
    forward = [each for each in classes if each.in_fp8(FPROP)]
    ran = {role: sum(len(each.products.get(role, ())) for each in forward) for role in (*ROLES, RECOMPUTE)}
    quick = {role: sum(each.in_fp8(role) for each in forward) for role in (*ROLES, RECOMPUTE)}
    missing = [role for role in (DGRAD, WGRAD) if ran[role] and not quick[role]]
    if missing and not any(quick[role] for role in (DGRAD, WGRAD)):
        yield Note(
            W.FORWARD_ALONE,
            f"the forward pass is in FP8, and {' and '.join(missing)} of the same layers in high precision",
            "a recipe for training: weights quantized for inference have no backward pass in FP8",
        )
    elif missing:
        yield Note(
            W.ROLE_MISSING,
            f"{missing[0]} of the FP8 layers runs in high precision: rowwise_with_gw_hp does so on purpose",
        )
    if ran[RECOMPUTE] and quick[RECOMPUTE] < ran[RECOMPUTE] and quick[FPROP] == ran[FPROP]:
        yield Note(
            W.RECOMPUTED_OTHERWISE,
            f"{ran[RECOMPUTE] - quick[RECOMPUTE]} of {ran[RECOMPUTE]} recomputed products run in high precision",
            "open the autocast inside the checkpointed function; for Transformer Engine use its own checkpoint",
        )


def evaluated_otherwise(training: Training, window: Window, classes: Sequence[Class]) -> Iterator[Note]:
    quick = [(each.inputs, each.outputs) for each in classes if each.in_fp8(FPROP)]
    evaluated = [each for each in attribute(window.evaluated, training.layers).classes if not each.in_fp8(FPROP)]
    high = [product for each in evaluated if (each.inputs, each.outputs) in quick for product in each.products[FPROP]]
    if high:
        yield Note(
            W.SWITCHED_OFF,
            f"{len(high)} products of FP8 layers ran in {high[0].kind} in an evaluation before this step",
            "open the autocast around the evaluation too, if its loss shall be that of the model as it trains",
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


def options_dropped(training: Training) -> Iterator[Note]:
    wanted, recipes = training.settings("te_asked") or {}, training.evidence.get("recipes", {})
    environment = training.evidence.get("environment", {})
    for name, default in recipe_facts("accelerate_te", "delayed").options.items():
        said, used = wanted.get(name), [recipe for recipe in recipes if f"{name}=" in recipe]
        if said and used and not any(re.search(rf"\b{name}={said}\b", recipe) for recipe in used):
            yield Note(
                W.OPTION_DROPPED,
                f"TERecipeKwargs({name}={said!r}) is not what runs: {used[0][:80]}",
                "give Transformer Engine the recipe yourself",
            )
        variable = OPTION_VARIABLE + name.removeprefix("fp8_").upper()
        # Accelerate's launcher sets all of them, those that nobody asked for to their defaults.
        if training.settings("torchao") and environment.get(variable, str(default)) != str(default):
            yield Note(
                W.OPTION_DROPPED,
                f"{variable}={environment[variable]} is for Transformer Engine, and torchao is in force",
                f"{OPTION_VARIABLE}BACKEND=te",
            )
    if any(config.get("force_recompute_fp8_weight_in_bwd") == "True" for config in training.settings("torchao") or ()):
        yield Note(
            W.OPTION_DROPPED,
            "force_recompute_fp8_weight_in_bwd=True of Float8LinearConfig does nothing in this torchao",
            "leave it out, or checkpoint activations",
        )


def names(layers: Sequence[Layer]) -> str:
    return listed(layer["name"] for layer in layers)
