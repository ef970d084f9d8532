"""What an arm notes of its model as it is built: a hash of what an own model executes, what its conversion drops, and
which modules multiply in FP8.

The hash, for the hash of the case, is of the reference arm's first step. A Linear may do more than multiply (a forward
of its own, a hook), which a conversion may not keep. And no class says of a layer that a user wrote over
``torch._scaled_mm``, nor of a Linear whose weight is one of torchao's wrappers, that it multiplies in FP8: its products
do, in one recorded step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.backends.linears import linears, weight_of
from pytest_fp8.casts import Cast, Casts, promised_casts
from pytest_fp8.questions.layers.products import FP8, LayerCall, Product
from pytest_fp8.recipes import DGRAD, FPROP, ROLES, known_backend
from pytest_fp8.worker.record.accuracy import is_product
from pytest_fp8.worker.record.recorder import StepRecorder, StepTable
from pytest_fp8.worker.record.tables import layer_table
from pytest_fp8.worker.state.snapshot import generators_kept, unchanged
from pytest_fp8.worker.tensors import plain_name


@contextmanager
def _recording(engine: Any, recorder: StepRecorder) -> Iterator[None]:
    """What runs inside is recorded, uncompiled, and changes nothing."""
    with unchanged(engine), torch.compiler.set_stance("force_eager"), recorder.watching():
        yield
    engine.park()


# -- the first step of an own model's reference, as a hash ------------------------------------------------------------

VARY = "other shapes with other data"


def first_step(engine: Any) -> str:
    """16 hex digits, equal in every process and on every device; empty unless the arm is an own model's reference.

    A fresh process of an arm that has run it before is told the result and does not run it again. Call it before the
    warm-up: there is no optimizer state yet, so that an uncompiled step fits where training fits.
    """
    told: str = engine.spec.first_step
    if told or engine.setup.own is None or engine.case != engine.case.reference():
        return told
    return hashlib.sha256(json.dumps(executed(engine)).encode()).hexdigest()[:16]


def executed(engine: Any) -> dict[str, Any]:
    """The plain BF16 model as it is built, a batch, and the calls of modules with weights in one uncompiled step.

    ``calls``: see :func:`calls_of`. The step runs on two batches. Where the calls differ, as where a router chooses the
    rows of an expert, they follow from numbers that no two devices round alike, and do not count.
    """
    with generators_kept():
        calls, others = (_calls(engine, engine.timing_batch(index)) for index in range(2))
        batch = _shapes(engine.timing_batch(0))
    return {**engine.definition, "batch": batch, "calls": calls if calls == others else VARY}


def definition_of(model: torch.nn.Module) -> dict[str, Any]:
    """``modules``: name and class; ``parameters``: name, shape, dtype, whether it is trained; ``buffers``: name, shape,
    dtype. Classes count by ``__qualname__`` alone, since libraries move their modules between releases."""
    return {
        "modules": [[name, _class(module)] for name, module in model.named_modules()],
        "parameters": [[name, *_kind(p), p.requires_grad] for name, p in model.named_parameters()],
        "buffers": [[name, *_kind(buffer)] for name, buffer in model.named_buffers()],
    }


def _calls(engine: Any, batch: Any) -> list[Any]:
    """Of one forward pass up to the loss, or of one whole hand-written step."""
    recorder = StepRecorder(engine.model)
    with _recording(engine, recorder):
        if engine.own_step is not None:
            engine.step(batch, recorder.in_phase)
        else:
            with recorder.in_phase("forward"), engine.precision():
                engine.loss_of(engine.called, batch)
    return calls_of(recorder.table, engine.model)


def calls_of(table: StepTable, model: torch.nn.Module) -> list[Any]:
    """The calls in the forward part, in order: name, train or eval, shape and dtype of each tensor given.

    Of modules that hold a parameter with two or more dimensions: Linear, convolution, embedding, stacked experts. These
    are the same in every torch and on every device, where the operators of a product are not. What attention multiplies
    follows from its projections' shapes. Not in the backward pass: how far torch recomputes there depends on its
    version.
    """
    names = {
        plain_name(name): name
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    return [
        [names[call.module], call.training, [_told(shape, f"torch.{dtype}") for shape, dtype in call.tensors]]
        for call in table.calls
        if call.part == "forward" and call.module in names
    ]


def _shapes(batch: Any) -> Any:
    """A batch without its numbers: of tensors shape and dtype, of all else the class."""
    if isinstance(batch, torch.Tensor):
        return _kind(batch)
    if isinstance(batch, Mapping):
        return {str(key): _shapes(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_shapes(value) for value in batch]
    return _class(batch)


def _kind(tensor: torch.Tensor) -> list[Any]:
    return _told(tensor.shape, str(tensor.dtype))


def _told(shape: Iterable[Any], dtype: str) -> list[Any]:
    """Shape and dtype. A ragged size is a symbol that is numbered anew in each process, and -1 in a table."""
    return [[size if isinstance(size, int) and size >= 0 else "ragged" for size in shape], dtype]


def _class(value: Any) -> str:
    """The class's name, without the function in which it was defined."""
    return type(value).__qualname__.rpartition("<locals>.")[2]


# -- what a Linear does besides its product, and whether a conversion kept it -----------------------------------------

# Private: torch has no public list of a module's hooks.
_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def with_behaviour(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linears of an unconverted model that do more than multiply, by name."""
    return {name: linear for name, linear in linears(model).items() if _dropped(linear, None)}


def dropped_behaviour(
    before: Mapping[str, torch.nn.Linear], model: torch.nn.Module, converted: Iterable[str]
) -> dict[str, str]:
    """Converted layer -> what it did before the conversion and no longer does. A layer that was converted in place, or
    into a class derived from its own, still does it."""
    modules = dict(model.named_modules())
    gone = {name: _dropped(before[name], modules.get(name)) for name in converted if name in before}
    return {name: " and ".join(what) for name, what in gone.items() if what}


def _dropped(was: torch.nn.Linear, now: torch.nn.Module | None) -> list[str]:
    """What ``was`` does besides its product and ``now`` does not; with ``None``, all of it."""
    if was is now:
        return []
    kind = type(was)
    what = [said for hooks, said in _HOOKS.items() if getattr(was, hooks) and not getattr(now, hooks, None)]
    if kind.forward is not torch.nn.Linear.forward and not isinstance(now, kind) and not _multiplies_alone(was):
        what.append(f"the forward of {kind.__qualname__}")
    if "forward" in vars(was) and (now is None or "forward" not in vars(now)):
        what.append("a forward of its own")
    return what


def _multiplies_alone(linear: torch.nn.Linear) -> bool:
    """Whether its class's own forward computes what ``nn.Linear``'s does, by the same nodes of autograd, and leaves
    nothing behind in the layer. One that casts a weight to its input's type does."""
    held = dict(vars(linear))
    rows = torch.randn(ALIGNMENT, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight)
    try:
        with torch.enable_grad(), generators_kept():
            rows.requires_grad_()
            made, wanted = type(linear).forward(linear, rows), torch.nn.Linear.forward(linear, rows)
        alike = torch.equal(made, wanted) and _nodes(made.grad_fn) == _nodes(wanted.grad_fn)
    except Exception:
        return False  # It takes more than a tensor of rows, or gives more.
    kept = vars(linear).keys() == held.keys() and all(vars(linear)[key] is value for key, value in held.items())
    vars(linear).clear()
    vars(linear).update(held)
    return alike and kept


def _nodes(node: Any) -> list[str]:
    """The names of a node of autograd and of all that it goes on to."""
    return [] if node is None else [node.name(), *(name for each, _ in node.next_functions for name in _nodes(each))]


# -- which modules multiply in FP8 -----------------------------------------------------------------------------------


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
    with _recording(engine, recorder):
        engine.step(engine.timing_batch(0), recorder.in_phase)
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
