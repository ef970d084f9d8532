"""What the layers question asks of an arm: conversion, recipes in force, the products that one step executed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.linears import stacked_weights
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.ledger.evidence import enclosing
from pytest_fp8.worker.answers.ledger import ledger_of
from pytest_fp8.worker.answers.recorded import SEED, recorded
from pytest_fp8.worker.record.clock import NO_STEPS, busy_steps, made
from pytest_fp8.worker.record.profile import learn_families, profile_step
from pytest_fp8.worker.record.recorder import StepTable
from pytest_fp8.worker.record.tables import layer_table, products_of
from pytest_fp8.worker.tensors import Sharded, plain_name

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def layers(engine: Engine) -> dict[str, Any]:
    """The recorded step by layer and role, and on a GPU one profiled training step, as plain data."""
    table = recorded(engine, SEED).step.table
    modules = dict(engine.model.named_modules())
    live = [name for name in engine.originals if engine.backend.is_fp8_layer(modules[name])]
    found = layer_table(table, engine.originals, live)
    named = {plain_name(name): name for name in engine.originals}
    # The keys are the fields of questions.layers.evidence.LayersEvidence.
    return {
        "originals": {name: list(sizes) for name, sizes in engine.originals.items()},
        "converted": engine.conversion.converted,
        "skipped": to_plain(engine.conversion.skipped),
        "unmatched": engine.unmatched,
        "live_fp8": live,
        "kinds": {name: class_path(modules[name]) for name in engine.originals},
        "sharded": [n for n in engine.originals if Sharded.has(modules[n]._parameters.get("weight"))],
        "in_eval": sorted({call.name for call in found.calls if call.fp8 and not call.training}),
        "foreign": to_plain(found.foreign),
        "others": to_plain(found.others),
        "dropped_behaviour": engine.conversion.dropped_behaviour,
        "stacked_weights": stacked_weights(engine.model),
        "switches": engine.switches,
        "own_conversion": engine.converts_itself,
        "calls": to_plain(found.calls),
        "recipes": {named[name]: recipe for name, recipe in table.recipes.items()},
        **(
            _profiled(engine, [call.name for call in found.calls])
            if engine.device.type == "cuda"
            else _unprofiled(table)
        ),
    }


def _unprofiled(table: StepTable) -> dict[str, Any]:
    products = [owned.product for owned in products_of(table)]
    nothing = {"attention": {}, "milliseconds": {}, "waits": {}, "wire": [], "exposed_ms": 0.0, "rest": []}
    return {"products": to_plain(products), "families": None, "stale_amax": [], "routed": [], **nothing, **NO_STEPS}


def _profiled(engine: Engine, called: Collection[str]) -> dict[str, Any]:
    """One training step as it runs, and several with nothing but their kernels profiled. They train the model."""
    history = _amax_histories(engine)
    batch = engine.timing_batch(0)
    seen = profile_step(lambda phase: engine.step(batch, phase))
    rested = _unchanged(history, _amax_histories(engine) if history else {})
    return {
        **to_plain(seen),
        "families": learn_families(seen["products"]),
        "stale_amax": [name for name in rested if name in called],
        "routed": [name for name in engine.originals if enclosing(plain_name(name), ledger_of(engine).routed)],
        **made(busy_steps(), engine),
    }


def _amax_histories(engine: Engine) -> dict[str, list[float]]:
    """The amax history of each layer that keeps one."""
    kept = {name: engine.backend.scaling(module) for name, module in engine.model.named_modules()}
    return {
        name: [float(value) for value in scaling.history.reshape(-1).tolist()]
        for name, scaling in kept.items()
        if scaling is not None and scaling.history is not None
    }


def _unchanged(before: dict[str, list[float]], after: dict[str, list[float]]) -> list[str]:
    return [name for name, history in before.items() if after.get(name) == history]


def class_path(module: torch.nn.Module) -> str:
    """Module and name of the layer's class; of the library's class where one of this package is derived from it."""
    kind = next(k for k in type(module).__mro__ if not k.__module__.startswith("pytest_fp8."))
    return f"{kind.__module__}.{kind.__qualname__}"
