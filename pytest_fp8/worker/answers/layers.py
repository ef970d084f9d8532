"""What the layers question asks of an arm: conversion, recipes in force, the products that one step executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.linears import stacked_weights
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.layers.products import LayerCall, Product
from pytest_fp8.questions.ledger.evidence import ModuleCalls, OwnedProduct, enclosing
from pytest_fp8.recipes import RECOMPUTE
from pytest_fp8.worker.answers.busy import NO_STEPS, busy_steps
from pytest_fp8.worker.answers.ledger import ledger_of
from pytest_fp8.worker.tensors import is_sharded, plain_name
from pytest_fp8.worker.training.parallel import called
from pytest_fp8.worker.watch.kernel_families import learn_families
from pytest_fp8.worker.watch.ledger_operators import OperatorWatch
from pytest_fp8.worker.watch.observe import Part, observe_forward
from pytest_fp8.worker.watch.profile import profile_step

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def layers(engine: Engine) -> dict[str, Any]:
    """One observed forward pass and one measured training step, as plain data."""
    batch = engine.timing_batch(0)

    modules = dict(engine.model.named_modules())
    calls, recipes = observed(engine, batch)
    # The batch is made again, so that torch's generators are where the observed pass found them.
    batch = engine.timing_batch(0)
    engine.park()
    sharded = [name for name in engine.originals if is_sharded(modules[name]._parameters.get("weight"))]
    history = _amax_histories(engine)
    if engine.device.type == "cuda":
        seen = profile_step(lambda phase: engine.step(batch, phase))
        products: list[Product] = seen["products"]
        families = learn_families(products)
        attention, milliseconds, waits = seen["attention"], seen["milliseconds"], seen["waits"]
        wire, exposed, rest = to_plain(seen["wire"]), seen["exposed_ms"], to_plain(seen["rest"])
    else:
        watch = OperatorWatch(engine.model)
        with watch.watching():
            engine.step(batch, watch.in_phase)
        products, families, attention, milliseconds = [owned.product for owned in watch.products], None, {}, {}
        waits, wire, exposed, rest = {}, [], 0.0, []
    rested = _unchanged(history, _amax_histories(engine) if history else {})
    # A compiled step runs no code that could say which module multiplies: there the uncompiled step tells it.
    if engine.device.type == "cuda":
        owned, called_modules = ledger_of(engine).products, ledger_of(engine).calls
    else:
        owned, called_modules = watch.products, watch.modules.counted()
    live = [name for name in engine.originals if engine.backend.is_fp8_layer(modules[name])]
    # The keys are the fields of questions.layers.evidence.LayersEvidence.
    return {
        "originals": {name: list(sizes) for name, sizes in engine.originals.items()},
        "converted": engine.conversion.converted,
        "skipped": to_plain(engine.conversion.skipped),
        "unmatched": engine.unmatched,
        "live_fp8": live,
        "kinds": {name: class_path(modules[name]) for name in engine.originals},
        "sharded": sharded,
        "in_eval": sorted({call.name for call in calls if call.fp8 and not call.training}),
        "foreign": to_plain(_foreign(engine, owned, called_modules)),
        "dropped_behaviour": engine.conversion.dropped_behaviour,
        "stacked_weights": stacked_weights(engine.model),
        "stale_amax": [name for name in rested if name in {call.name for call in calls}],
        "switches": engine.switches,
        "calls": to_plain(calls),
        "recipes": recipes,
        "products": to_plain(products),
        "families": families,
        "attention": attention,
        "milliseconds": milliseconds,
        "wire": wire,
        "exposed_ms": exposed,
        "rest": rest,
        "waits": waits,
        "recompute": engine.case.activation_checkpointing,
        # Last: these steps train the model, and leave torch's generators elsewhere.
        **(busy_steps(engine) if engine.device.type == "cuda" else NO_STEPS),
    }


def observed(engine: Engine, batch: Any) -> tuple[list[LayerCall], dict[str, dict[str, Any]]]:
    """:func:`observe_forward` of one eager forward pass of a model of ours, or of one eager step of a user's, that
    changes no weight."""
    if engine.setup.own is None:

        def forward() -> Any:
            with engine.precision():
                return engine.loss_of(called(engine), batch)

        seen = observe_forward(engine.model, engine.originals, engine.backend, forward)
        engine.backend.settle(engine.model)
        return seen
    part = Part()

    def step() -> None:
        engine.step(batch, phase=part.inside)

    # All stays as it is for the measured step, in which a router must send the rows the same way.
    with engine.standing_still():
        return observe_forward(engine.model, engine.originals, engine.backend, step, part)


def _foreign(engine: Engine, owned: Sequence[OwnedProduct], calls: Sequence[ModuleCalls]) -> list[OwnedProduct]:
    """Products that no Linear called. One with the weight of a Linear that is called in the same phase is made beside
    the Linear's own, as for a quantization error, and not in its place: it is left without the Linear's name."""
    linears = {plain_name(name): name for name in engine.originals}
    called = {(call.module, call.phase) for call in calls}

    def in_place_of(each: OwnedProduct) -> str:
        phases = ("forward", RECOMPUTE) if each.product.phase == "backward" else (each.product.phase,)
        return "" if any((each.weight, phase) in called for phase in phases) else linears.get(each.weight, "")

    foreign = [each for each in owned if enclosing(each.owner, linears) is None]
    return [replace(each, weight=in_place_of(each)) for each in foreign]


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
