"""Times layers by themselves, forward and backward, in high precision and in FP8: what products and casts take.

In a profile of a whole step a cast is fused into other kernels, which belong to no layer. Alone all that runs is the
layers' own. Layers that are given the same input (q, k and v) run together: compiled code casts it once for all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends import backend
from pytest_fp8.backends.linears import mark_skipped
from pytest_fp8.questions.layers.products import EVALUATION
from pytest_fp8.recipes import DGRAD, RECOMPUTE, WGRAD, library_of
from pytest_fp8.worker.answers.recorded import SEED, recorded
from pytest_fp8.worker.record.profile import profile_step
from pytest_fp8.worker.record.recorder import NOTHING
from pytest_fp8.worker.training.preparation import under_autocast

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

BF16 = "bf16"
WARM_UP, REPEATED = 3, 10
"""Passes before those that count, of which the first compiles; and those that count."""
MANY = 1024
"""Of ``torch.compile``'s variants of one function: each group of layers is one."""

Context = Callable[[], AbstractContextManager[Any]]


def alone(engine: Engine, layers: Sequence[Sequence[Any]], recipes: Sequence[str]) -> dict[str, Any]:
    """``groups`` of the ``layers`` (name, inputs, outputs, rows, roles) that share an input, as
    :class:`pytest_fp8.questions.pays.Group`. Recipes that this machine cannot run are left out."""
    case, known, found = engine.case, dict[str, dict[str, Any]](), []
    usable = [name for name in recipes if name == case.recipe or _library(engine).usable(name, case.emulated)[0]]
    for members in sharing(engine, [name for name, *_ in layers]):
        sizes = [tuple(layers[index][1:3]) for index in members]
        *_, rows, owed = layers[members[0]]
        key = f"{sizes} {rows} {owed}"
        if key not in known:
            known[key] = together(engine, sizes, rows, owed, usable)
        found.append({"members": members, **known[key]})
    return {"groups": found}


def sharing(engine: Engine, names: Sequence[str]) -> list[list[int]]:
    """The layers, by their index, in groups that are given one and the same input in the recorded step."""
    given: dict[str, int] = {}
    for call in recorded(engine, SEED).step.table.calls:
        if call.phase != EVALUATION and call.given != NOTHING:
            given.setdefault(call.module, call.given)
    groups: dict[Any, list[int]] = {}
    for index, name in enumerate(names):
        groups.setdefault(given.get(name, f"{name} is not called"), []).append(index)
    return list(groups.values())


def together(
    engine: Engine, sizes: Sequence[tuple[int, int]], rows: int, owed: Sequence[str], recipes: Sequence[str]
) -> dict[str, Any]:
    """Times of Linears of these sizes (inputs, outputs) that share an input: with none in FP8, and for each recipe with
    all, and with all but each one."""

    def timed(recipe: str, high: int | None = None) -> dict[str, float]:
        model, context = _layers(engine, recipe, sizes, high)
        return _timed(engine, model, context, sizes, rows, owed)

    none = timed(BF16)
    several = range(len(sizes)) if len(sizes) > 1 else ()
    return {
        "none": none,
        "recipes": {
            recipe: {"all": timed(recipe), "without": [timed(recipe, index) for index in several] or [none]}
            for recipe in recipes
        },
    }


class _Together(torch.nn.Module):
    """Layers that share an input."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, given: torch.Tensor) -> list[torch.Tensor]:
        return [layer(given) for layer in self.layers]


def _library(engine: Engine) -> Any:
    """The backend of the library itself, whose layers another one may train."""
    return backend(library_of(engine.case.backend))


def _layers(
    engine: Engine, recipe: str, sizes: Sequence[tuple[int, int]], high: int | None
) -> tuple[torch.nn.Module, Context]:
    """The layers in this recipe, but for the one at ``high``; and what makes the context around a forward pass."""
    case, dtype = engine.case, torch.float32 if engine.case.autocast else torch.bfloat16
    # In a module: a library replaces what hangs in another one.
    model: Any = torch.nn.Sequential(
        *(torch.nn.Linear(*each, bias=False, device=engine.device, dtype=dtype) for each in sizes)
    )
    if recipe == BF16:
        return _Together(model), _context(engine, nullcontext)
    if engine.converts_itself:
        for index, each in enumerate(sizes):
            if index != high:
                model[index] = _copied(engine, *each)
        return _Together(model), engine.precision
    mark_skipped(model, [str(high)])
    library = _library(engine)
    if recipe != case.recipe or library.name != case.backend or case.parallel:
        case = replace(case, backend=library.name, recipe=recipe, options={}, gpus=1, parallel="")
    made = library.convert(model, case).model or model
    return _Together(made), _context(engine, library.precision(case))


def _context(engine: Engine, inner: Context) -> Context:
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


def _timed(
    engine: Engine,
    model: torch.nn.Module,
    context: Context,
    sizes: Sequence[tuple[int, int]],
    rows: int,
    owed: Sequence[str],
) -> dict[str, float]:
    """Milliseconds of the GPU in one forward and backward pass. On a CPU, which has no kernels, all of it is
    ``rest``."""
    device, dtype = engine.device, next(model.parameters()).dtype
    for parameter in model.parameters():
        parameter.requires_grad_(WGRAD in owed)
    given = torch.randn(rows, sizes[0][0], device=device, dtype=dtype).requires_grad_(DGRAD in owed)
    gradients = [torch.randn(rows, outputs, device=device, dtype=torch.bfloat16) for _, outputs in sizes]
    passes = 2 if RECOMPUTE in owed else 1

    def run(times: int) -> None:
        for _ in range(times):
            for _ in range(passes):
                with context():
                    found = model(given)
            if found[0].requires_grad:
                torch.autograd.backward(found, [g.to(o.dtype) for o, g in zip(found, gradients, strict=True)])
            for each in (given, *model.parameters()):
                each.grad = None

    with _compiled(model) if engine.compiled else nullcontext():
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
    return {"products": products / REPEATED, "rest": seen["rest"] / REPEATED}


@contextmanager
def _compiled(model: torch.nn.Module) -> Iterator[None]:
    # Not for any size: those of the layers before would make this one's dynamic, and its kernels others.
    model.compile(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        yield
