"""Checkpoints through the user's own ``save()`` and ``load()``: called, and what the arm holds before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.plain import to_plain
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, OwnLoaded, OwnSaved, Resumed
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.answers import checkpoints
from pytest_fp8.worker.answers.held_out import output_on
from pytest_fp8.worker.answers.load_watch import LoadWatch
from pytest_fp8.worker.known_errors import known_cause
from pytest_fp8.worker.state import checkpoint_stores
from pytest_fp8.worker.state.checkpoint_stores import digests
from pytest_fp8.worker.state.fused_params import plain_name
from pytest_fp8.worker.state.optimizer_state import foreign
from pytest_fp8.worker.state.own_state import changed_flags, flags_of
from pytest_fp8.worker.state.training_state import (
    buffers_kept,
    generators,
    generators_kept,
    kept,
    not_persistent_kept,
)
from pytest_fp8.worker.training.model_output import inputs_noted
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import name_of

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

SaveOrLoad = Callable[[Any, Any, Any], Any]
"""``save(model, optimizer, folder)`` or ``load(model, optimizer, folder)``."""
OTHER_SEED = 1_000_003
"""Weights, optimizer and generators of the arm before the user's ``load()``: what that leaves out is then not right by
accident."""
CASTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
"""Casts that a checkpoint may have made, from the coarsest."""


def are_given(engine: Engine) -> bool:
    """Whether the workload brings ``save()`` and ``load()``."""
    return engine.setup.own is not None and engine.setup.own.save is not None


def save(engine: Engine, folder: str, optimizer: bool) -> dict[str, Any]:
    """Have the user's ``save()`` write to ``folder``; gives the fields of :class:`Saved`."""
    function, _ = _functions(engine)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights, _, scaling = checkpoints.weights_of(engine)
    before = digests(weights)
    state = checkpoints.optimizer_state_of(engine) if optimizer else {}
    saved = OwnSaved(
        kept=kept(engine.model, engine.optimizer, engine.backend),
        changed_by_saving=[],
        buffers=sorted(set(weights) & {plain_name(name) for name, _ in engine.model.named_buffers()}),
        casts=_casts(weights),
        drawn=_drawn(engine),
        foreign=len(foreign(engine.model, engine.optimizer)),
    )
    state_digests, flags = checkpoints.state_digests(state), flags_of(engine.model)
    with _reported("save", function):
        function(engine.wrapped, engine.optimizer, path)
    engine.synchronize()
    now = digests(checkpoints.weights_of(engine)[0])
    return {
        "keys": sorted(weights),
        "untied": {},
        "scaling_state": scaling,
        "left_out": [],
        "narrowed": checkpoints.narrowed(engine, state),
        "frozen": 0,
        "on_disk": checkpoint_stores.dtypes_on_disk(path, "safetensors"),
        "digests": before,
        "optimizer_digests": state_digests,
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "own": {
            **to_plain(saved),
            "changed_by_saving": sorted(name for name in before if now.get(name) != before[name]),
            "flags": changed_flags(flags, engine.model),
        },
    }


def load(engine: Engine, folder: str, optimizer: bool) -> dict[str, Any]:
    """Have the user's ``load()`` read ``folder`` into the arm, which holds other values before; gives the fields of
    :class:`Loaded`."""
    _, function = _functions(engine)
    # What is drawn once and never saved, as random frequencies, is what a run with the same seed has.
    with not_persistent_kept(engine.model):
        engine.restart(OTHER_SEED)
    watch = LoadWatch(engine)
    watch.before(own_load=True)
    before, flags = digests(checkpoints.weights_of(engine)[0]), flags_of(engine.model)
    others = len(foreign(engine.model, engine.optimizer))
    with generators_kept():
        # A state that no training run reaches by itself.
        seed_generators(OTHER_SEED)
        strange = generators()
        with _reported("load", function):
            function(engine.wrapped, engine.optimizer, Path(folder))
        found = kept(engine.model, engine.optimizer, engine.backend)
        restored = {name: state for name, state in found.generators.items() if state != strange.get(name)}
    weights, _, scaling = checkpoints.weights_of(engine)
    state = checkpoints.optimizer_state_of(engine) if optimizer else {}
    strays = len(foreign(engine.model, engine.optimizer)) > others
    report: dict[str, Any] = {
        "missing": [],
        "unexpected": [],
        "wrong_shape": [],
        "untied": {},
        "loaded": True,
        "rebuilt_scaling_state": scaling,
        "refused": "",
        "stale": [],
        "left_out": [],
        "digests": digests(weights),
        "optimizer_digests": checkpoints.state_digests(state),
    }
    report["untouched"] = checkpoints.untouched(before, report["digests"])
    report["stale"], report["unchecked"] = watch.stale(), watch.unchecked
    changed = changed_flags(flags, engine.model)
    report["own"] = to_plain(OwnLoaded(replace(found, generators=restored), flags=changed, strays=strays))
    engine.renew_scales()
    engine.park()
    return report


def resumed(engine: Engine, seed: int, first_step: int, steps: int) -> dict[str, Any]:
    """The fields of :class:`Resumed` for ``steps`` training steps from where the arm is. What it keeps besides is told
    only where the workload saves it."""
    with inputs_noted(engine.model) as inputs:
        curve = engine.curve(seed, steps, first_step=first_step)
    now = kept(engine.model, engine.optimizer, engine.backend) if are_given(engine) else NOT_RESUMED.kept
    return to_plain(Resumed(curve["losses"], curve["data"], inputs, now))  # type: ignore[no-any-return]


def _functions(engine: Engine) -> tuple[SaveOrLoad, SaveOrLoad]:
    own = engine.setup.own
    if own is None or own.save is None or own.load is None:
        raise WorkloadError("no_save")
    return own.save, own.load


@contextmanager
def _reported(which: str, function: SaveOrLoad) -> Iterator[None]:
    """An exception of the user's function as one error that names it."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:600]}"
        told = WorkloadError("checkpoint_raised", which=which, function=name_of(function), error=said)
        known = known_cause(error)
        if known[1]:
            told.fp8_code, told.fp8_cause, told.fp8_next = known
        raise told from error


def _casts(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, int]]:
    """dtype -> weight -> digest after a cast to it and back. Only where the cast changes a value."""
    found: dict[str, dict[str, int]] = {}
    for dtype in CASTS:
        named = found.setdefault(str(dtype).removeprefix("torch."), {})
        for name, weight in weights.items():
            if weight.is_floating_point() and weight.dtype != dtype:
                cast = weight.detach().to(dtype).to(weight.dtype)
                if not torch.equal(cast, weight):
                    named.update(digests({name: cast}))
    return found


def _drawn(engine: Engine) -> list[str]:
    """Generators that a forward pass in training moves: dropout, noise, stochastic depth."""
    with generators_kept(), buffers_kept(engine.model), torch.compiler.set_stance("force_eager"):
        batch = engine.training_batch(OTHER_SEED, step=0)
        before = generators()
        output_on(engine, batch)
        return sorted(name for name, state in generators().items() if state != before.get(name))
