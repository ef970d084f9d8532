"""Checkpoints through the user's own ``save()`` and ``load()``: called, and what the arm holds before and after."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_fp8.backends.base import Backend
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, Kept, Loaded, OwnLoaded, OwnSaved, Resumed, Saved
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.checkpoint.roundtrip import (
    LISTED_ELSEWHERE,
    arrived,
    on_disk,
    optimizer_state,
    record,
    weights_of,
)
from pytest_fp8.worker.checkpoint.stores import leaves
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.record.held_out import output_on
from pytest_fp8.worker.record.probe import StaleCopies
from pytest_fp8.worker.state.snapshot import generators_kept, unchanged
from pytest_fp8.worker.tensors import digests, foreign, plain_name
from pytest_fp8.worker.training.setup import seed_generators
from pytest_fp8.worker.training.step import innermost, inputs_noted, name_of, schedule_of, schedule_state

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

SaveOrLoad = Callable[[Any, Any, Path], Any]
"""``save(model, optimizer, folder)`` or ``load(model, optimizer, folder)``."""
OTHER_SEED = 1_000_003
"""Weights, optimizer and generators of the arm before the user's ``load()``: what that leaves out is then not right by
accident."""
CASTS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16)
"""Casts that a checkpoint may have made, from the coarsest."""
SWITCHES = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a group that choose an implementation and keep nothing; and its parameters."""
PRIVATE = re.compile(r"(^|\.)_(?!schedulers\b)")
"""Names of a library's own bookkeeping: of these only tensors count."""


def are_given(engine: Engine) -> bool:
    """Whether the workload brings ``save()`` and ``load()``."""
    return engine.setup.own is not None and engine.setup.own.save is not None


def save(engine: Engine, folder: Path, optimizer: bool) -> Saved:
    """Have the user's ``save()`` write to ``folder``."""
    function, _ = _functions(engine)
    folder.mkdir(parents=True, exist_ok=True)
    weights, _, scaling = weights_of(engine)
    saved = record(engine, weights, scaling, optimizer_state(engine) if optimizer else {})
    own = OwnSaved(
        kept=kept(engine.model, engine.optimizer, engine.backend),
        changed_by_saving=[],
        buffers=sorted(set(weights) & {plain_name(name) for name, _ in engine.model.named_buffers()}),
        casts=_casts(weights),
        drawn=_drawn(engine),
        foreign=len(foreign(engine.model, engine.optimizer)),
    )
    flags = flags_of(engine.model)
    with _reported("save", function):
        function(engine.wrapped, engine.optimizer, folder)
    engine.synchronize()
    now = digests(weights_of(engine)[0])
    changed = sorted(name for name, digest in saved.digests.items() if now.get(name) != digest)
    own = replace(own, changed_by_saving=changed, flags=changed_flags(flags, engine.model))
    return replace(on_disk(saved, folder, "safetensors"), own=own)


def load(engine: Engine, folder: Path, optimizer: bool) -> Loaded:
    """Have the user's ``load()`` read ``folder`` into the arm, which holds other values before."""
    _, function = _functions(engine)
    # What is drawn once and never saved, as random frequencies, is what a run with the same seed has.
    drawn = [(buffer, buffer.clone()) for _, buffer in not_persistent(engine.model)]
    engine.restart(OTHER_SEED)
    with torch.no_grad():
        for buffer, values in drawn:
            buffer.copy_(values)
    watch = StaleCopies(engine)
    watch.before(own_load=True)
    before, flags = digests(weights_of(engine)[0]), flags_of(engine.model)
    others = len(foreign(engine.model, engine.optimizer))
    with generators_kept():
        # A state that no training run reaches by itself.
        seed_generators(OTHER_SEED)
        strange = generators()
        with _reported("load", function):
            function(engine.wrapped, engine.optimizer, folder)
        found = kept(engine.model, engine.optimizer, engine.backend)
        restored = {name: state for name, state in found.generators.items() if state != strange.get(name)}
    changed = changed_flags(flags, engine.model)
    strays = len(foreign(engine.model, engine.optimizer)) > others
    own = OwnLoaded(replace(found, generators=restored), flags=changed, strays=strays)
    return replace(arrived(engine, optimizer, watch, before), own=own)


def resumed(engine: Engine, seed: int, first_step: int, steps: int) -> Resumed:
    """Train ``steps`` steps from where the arm is. What it keeps besides is told only where the workload saves it."""
    with inputs_noted(engine.model) as inputs:
        run = curve(engine, seed, steps, first_step=first_step)
    now = kept(engine.model, engine.optimizer, engine.backend) if are_given(engine) else NOT_RESUMED.kept
    return Resumed(run["losses"], run["data"], inputs, now)


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
    with unchanged(engine), torch.compiler.set_stance("force_eager"):
        batch = engine.training_batch(OTHER_SEED, step=0)
        before = generators()
        output_on(engine, batch)
        return sorted(name for name, state in generators().items() if state != before.get(name))


# -- modes of modules, and which parameters are trained ---------------------------------------------------------------

MODE, TRAINED = "mode", "trained"
WORDS = {
    (MODE, True): "put into train mode",
    (MODE, False): "put into eval mode",
    (TRAINED, True): "made trainable",
    (TRAINED, False): "frozen",
}


def flags_of(model: torch.nn.Module) -> dict[tuple[str, str], bool]:
    """(which flag, plain name) -> its value."""
    modes = {(MODE, plain_name(name)): module.training for name, module in model.named_modules()}
    trained = {(TRAINED, plain_name(name)): parameter.requires_grad for name, parameter in model.named_parameters()}
    return modes | trained


def changed_flags(before: Mapping[tuple[str, str], bool], model: torch.nn.Module) -> dict[str, list[str]]:
    """What was done to them since, in words -> names."""
    changed: dict[str, list[str]] = {}
    for (flag, name), value in flags_of(model).items():
        if before.get((flag, name), value) != value:
            changed.setdefault(WORDS[flag, value], []).append(name or "the model")
    return changed


# -- what is kept beside weights and the optimizer's state of each parameter ------------------------------------------


def kept(model: torch.nn.Module, optimizer: Any, backend: Backend) -> Kept:
    """What is kept now: the schedule, the optimizer's groups and attributes, buffers that are not persistent, and the
    states of random generators."""
    inner = innermost(optimizer)
    of_model = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    groups = {
        f"group {index}: {name}": value
        for index, group in enumerate(inner.param_groups)
        for name, value in group.items()
        if name not in SWITCHES
    }
    # Of private attributes those that are tensors or hold them: others may be caches of anything.
    attributes = {
        name: value
        for one in (inner, optimizer)
        for name, value in vars(one).items()
        if name not in LISTED_ELSEWHERE and (not name.startswith("_") or isinstance(value, (torch.Tensor, list, tuple)))
    }
    buffers = {name: value for name, value in not_persistent(model) if not backend.is_scaling_state(name)}
    return Kept(
        schedule=dict(_entries(schedule_state(schedule_of(optimizer)).items(), of_model)),
        groups=dict(_entries(groups.items(), of_model)),
        attributes=dict(_entries(attributes.items(), of_model)),
        buffers=dict(_entries(((plain_name(name), value) for name, value in buffers.items()), ())),
        generators=generators(),
    )


def generators() -> dict[str, str]:
    """A digest of each random generator's state, by name."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["torch on the GPU"] = torch.cuda.get_rng_state().numpy().tobytes()
    states["random"] = repr(random.getstate()).encode()
    kind, keys, *rest = np.random.get_state()
    states["numpy"] = repr((kind, np.asarray(keys).tolist(), rest)).encode()
    return {name: f"state {zlib.crc32(state):08x}" for name, state in states.items()}


def not_persistent(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, value) of each buffer that the model declares as not persistent."""
    for name, value in model.named_buffers(remove_duplicate=False):
        holder, _, own = name.rpartition(".")
        # Private: a model's state dict is without them, and nothing public lists them.
        if own in model.get_submodule(holder)._non_persistent_buffers_set:
            yield name, value


def _entries(values: Iterable[tuple[str, Any]], of_model: Container[int]) -> Iterator[tuple[str, Any]]:
    """(name, number or text of a digest) of all numbers and tensors in these values. What belongs to the model is
    listed with its weights."""
    for name, leaf in (found for entry, value in values for found in leaves(entry, value)):
        # Scaling state of Transformer Engine, which the other precision does not have.
        if id(leaf) in of_model or name.endswith("_extra_state"):
            continue
        if isinstance(leaf, torch.Tensor):
            yield name, _tensor(leaf)
        elif isinstance(leaf, (bool, int, float)):
            if not PRIVATE.search(name):
                yield name, leaf
        elif callable(getattr(leaf, "state_dict", None)) and not isinstance(leaf, type):
            yield from _entries([(name, leaf.state_dict())], of_model)


def _tensor(value: torch.Tensor) -> Any:
    """A tensor of one element as its number, another as the text of its digest."""
    value = value.detach()
    if value.numel() == 1 and not value.is_complex():
        return value.item()
    shape = "x".join(str(size) for size in value.shape)
    return f"tensor {shape} {digests({'': value})['']:x}"
