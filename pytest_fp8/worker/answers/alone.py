"""Times one layer by itself, forward and backward, in high precision and in FP8: what its products and its casts take.

In a profile of a whole step a cast is fused into other kernels, which belong to no layer. Alone all that runs is the
layer's own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends import backend
from pytest_fp8.recipes import DGRAD, RECOMPUTE, WGRAD, library_of
from pytest_fp8.worker.record.profile import profile_step
from pytest_fp8.worker.tensors import shape
from pytest_fp8.worker.training.preparation import under_autocast

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

BF16 = "bf16"
WARM_UP, REPEATED = 3, 10
"""Passes before those that count, of which the first compiles; and those that count."""

Layer = tuple[torch.nn.Module, Callable[[], AbstractContextManager[Any]]]
"""A layer, and what makes the context around its forward pass."""


def alone(engine: Engine, shapes: Sequence[Sequence[Any]], recipes: Sequence[str]) -> list[dict[str, Any]]:
    """Of each shape (inputs, outputs, rows, roles): recipe, and ``bf16`` -> milliseconds of one pass.

    Recipes that this machine cannot run are left out. Equal shapes are timed once. On a CPU, which has no kernels, all
    of the time is ``rest``.
    """
    usable = [
        name for name in recipes if name == engine.case.recipe or _library(engine).usable(name, engine.case.emulated)[0]
    ]
    known: dict[str, dict[str, Any]] = {}
    found = []
    for inputs, outputs, rows, owed in shapes:
        key = f"{inputs} {outputs} {rows} {owed}"
        if key not in known:
            known[key] = {
                name: _timed(engine, _layer(engine, name, inputs, outputs), inputs, rows, owed)
                for name in (BF16, *usable)
            }
        found.append(known[key])
    return found


def _library(engine: Engine) -> Any:
    """The backend of the library itself, whose layers another one may train."""
    return backend(library_of(engine.case.backend))


def _layer(engine: Engine, recipe: str, inputs: int, outputs: int) -> Layer:
    dtype = torch.float32 if engine.case.autocast else torch.bfloat16
    linear = torch.nn.Linear(inputs, outputs, bias=False, device=engine.device, dtype=dtype)
    case = engine.case
    if recipe == BF16:
        return _compiled(engine, linear), _context(engine, nullcontext)
    if engine.converts_itself:
        return _compiled(engine, _copied(engine, inputs, outputs)), engine.precision
    library = _library(engine)
    if recipe != case.recipe or library.name != case.backend or case.parallel:
        case = replace(case, backend=library.name, recipe=recipe, options={}, gpus=1, parallel="")
    # In a module: a library replaces what hangs in another one.
    model = torch.nn.Sequential(linear)
    made = library.convert(model, case).model or model
    return _compiled(engine, made), _context(engine, library.precision(case))


def _context(
    engine: Engine, inner: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    return partial(under_autocast, engine.device, inner) if engine.case.autocast else inner


def _copied(engine: Engine, inputs: int, outputs: int) -> torch.nn.Module:
    """A copy of one of the live layers of these sizes: the user's own conversion made them."""
    modules = dict(engine.model.named_modules())
    like: torch.nn.Module = next(
        modules[name]
        for name, sizes in engine.originals.items()
        if tuple(sizes) == (inputs, outputs) and engine.is_fp8_layer(modules[name])
    )
    copied: torch.nn.Module = copy.deepcopy(like)
    return copied


def _compiled(engine: Engine, layer: torch.nn.Module) -> torch.nn.Module:
    layer.train()
    if engine.compiled:
        # Not for any shape: sizes of the layer before would make this one's dynamic, and its kernels others.
        layer.compile(dynamic=False)
    return layer


def _timed(engine: Engine, layer: Layer, inputs: int, rows: int, owed: Sequence[str]) -> dict[str, float]:
    module, context = layer
    for parameter in module.parameters():
        parameter.requires_grad_(WGRAD in owed)
    device = engine.device
    dtype = next(module.parameters()).dtype
    given = torch.randn(rows, inputs, device=device, dtype=dtype).requires_grad_(DGRAD in owed)
    passes = 2 if RECOMPUTE in owed else 1
    outputs = shape(next(module.parameters()))[0]
    gradient = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def run(times: int) -> None:
        for _ in range(times):
            for _ in range(passes):
                with context():
                    output = module(given)
            if output.requires_grad:
                output.backward(gradient.to(output.dtype))
            for each in (given, *module.parameters()):
                each.grad = None

    run(WARM_UP)
    if device.type != "cuda":
        start = time.perf_counter()
        run(1)
        return {"products": 0.0, "rest": 1000 * (time.perf_counter() - start)}

    def profiled(phase: Callable[[str], Any]) -> None:
        with phase("forward"):
            run(REPEATED)

    seen = profile_step(profiled)["milliseconds"]
    products = seen["fp8 products"] + seen["other products"]
    return {"products": products / REPEATED, "rest": max(0.0, seen["rest"]) / REPEATED}
