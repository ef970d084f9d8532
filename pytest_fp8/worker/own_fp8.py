"""Which modules multiply in FP8, and by which casts, where the workload's own conversion put them in FP8.

No class says it of a layer that a user wrote over ``torch._scaled_mm``, nor of a Linear whose weight is one of
torchao's wrappers: their products do, in one recorded step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fp8.backends.linears import weight_of
from pytest_fp8.casts import Cast, Casts, promised_casts
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.recipes import DGRAD, FPROP, ROLES, known_backend
from pytest_fp8.worker.record.accuracy import is_product
from pytest_fp8.worker.record.recorder import StepRecorder
from pytest_fp8.worker.record.tables import layer_table
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.tensors import plain_name


@dataclass(frozen=True)
class OwnFp8:
    """What the recorded step says of modules."""

    modules: frozenset[torch.nn.Module] = frozenset()
    """Those that multiply in FP8 in a forward pass that trains."""
    casts: Mapping[str, Casts] = field(default_factory=dict)
    """Live name -> how its operands become FP8, where that is not what the case's recipe promises."""


def own_fp8(engine: Any) -> OwnFp8:
    """Empty unless the workload of an FP8 arm converts by itself. Runs one uncompiled step, which changes nothing."""
    if not engine.converts_itself:
        return OwnFp8()
    modules = {name: each for name, each in engine.model.named_modules() if is_product(each)}
    sizes = {name: (int(w.shape[1]), int(w.shape[0])) for name, m in modules.items() if (w := weight_of(m)) is not None}
    recorder = StepRecorder(engine.model, engine.backend, sizes)
    with unchanged(engine), torch.compiler.set_stance("force_eager"), recorder.watching():
        engine.step(engine.timing_batch(0), recorder.in_phase)
    engine.park()
    table = recorder.table
    calls = {call.name: call for call in layer_table(table, sizes).calls if call.fp8 and not call.by}
    found = frozenset(modules[name] for name in calls)
    told = {name: table.recipes[plain_name(name)] for name in calls if plain_name(name) in table.recipes}
    casts = {name: casts_of(call) for name, call in calls.items() if name not in told}
    return OwnFp8(found, {**casts, **_of_other_recipes(engine.case, told)})


def casts_of(call: LayerCall) -> Casts:
    """How the operands of a call's products in FP8 were cast, as far as formats and scales tell."""
    casts = {}
    for role in ROLES:
        product = call.ran.get(role)
        if product is not None and product.kind == FP8 and product.formats and all(product.scales):
            casts[role] = _in_order(call, role, product)
    return casts


def _in_order(call: LayerCall, role: str, product: Product) -> tuple[Cast, Cast]:
    """The casts of input and weight, or first of the output's gradient: the operands may be multiplied transposed."""
    one, two = (Cast(f, s, product.powers) for f, s in zip(product.formats, product.scales, strict=True))
    first = {FPROP: call.rows, DGRAD: call.rows}.get(role, call.out_features)
    return (one, two) if product.outer[0] == first else (two, one)


def _of_other_recipes(case: Any, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Casts]:
    """Of layers to which the conversion gives another of the library's recipes than the case's, which others have."""
    asked = {"recipe": case.recipe, **case.full_options}
    if asked not in told.values():
        return {}
    known = [{"recipe": facts.name, **facts.options} for facts in known_backend(case.backend).recipes]
    others = {name: seen for name, seen in told.items() if seen != asked and seen in known}
    return {name: promised_casts(case.backend, seen["recipe"], seen) for name, seen in others.items()}
