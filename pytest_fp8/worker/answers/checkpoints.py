"""Saves and loads an arm's training state: weights by plain names, optimizer, schedule.

Tied tensors are stored once. Scaling state that a backend keeps beside its weights is left out on purpose and listed.
A backend with a frozen base stores its adapters only, and the number of the others is reported. What is no tensor is
carried where it is data alone, and else listed. Nothing else is left out: a stored key that the arm has no weight for
is reported. What is loaded goes through ``load_state_dict()`` of the model and of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.said import Told
from pytest_fp8.worker.answers.load_watch import LoadWatch
from pytest_fp8.worker.state import checkpoint_stores, optimizer_extras, optimizer_state, training_state
from pytest_fp8.worker.state.checkpoint_stores import MODEL, OPTIMIZER, digests, dtypes_on_disk
from pytest_fp8.worker.state.fused_params import join, plain_name, split
from pytest_fp8.worker.state.shards import assign, change, is_part, placed, plain_shards
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.ranks import rank, wait_for_all
from pytest_fp8.worker.training.zero import is_partitioned, shape
from pytest_fp8.worker.watch.ledger_weights import untied

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


BESIDES = "besides"
"""Key of what :func:`training_state.besides` gives, in the file of what is no plain tensor."""


class UnreadableWeightError(Told, TypeError):
    """Neither store can write a weight, because a tensor class wraps it."""


def save(engine: Engine, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
    """Write the arm's state to ``folder``; gives keys, scaling state, dtypes on disk and content digests."""
    weights, aliases, scaling = weights_of(engine)
    extra = _extra_state(engine)
    carried = {MODEL + name: value for name, value in extra.items() if training_state.is_data(value)}
    if optimizer:
        optimizer_state.require_own(engine.model, engine.optimizer)
    held = optimizer_state_of(engine) if optimizer else {}
    state = {key: value for key, value in held.items() if optimizer_extras.is_tensor(value)}
    of_optimizer = state_digests(held)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    checkpoint_stores.write(path, store, weights, state, aliases)
    if rank() == 0:
        extras = carried | {key: value for key, value in held.items() if key not in state}
        besides = training_state.besides(engine.optimizer) if optimizer else {}
        optimizer_extras.write(extras | {BESIDES: besides}, path)
    engine.synchronize()
    wait_for_all()
    return {
        "keys": sorted(weights),
        "untied": untied(*engine.weights),
        "scaling_state": scaling,
        "left_out": [
            f"{name} (a {type(value).__name__} that is not data alone)"
            for name, value in extra.items()
            if MODEL + name not in carried
        ],
        "narrowed": narrowed(engine, held),
        "frozen": sum(not engine.backend.is_checkpointed(key) for key in engine.model.state_dict()),
        "on_disk": dtypes_on_disk(path, store),
        "digests": digests(weights),
        "optimizer_digests": of_optimizer,
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "own": None,
    }


def load(engine: Engine, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
    """Read ``folder`` into the arm; gives missing and unexpected keys, and digests of what the arm now holds.

    Loads nothing where a weight is missing or unexpected, so that no half-loaded model trains on.
    """
    weights, aliases, scaling = weights_of(engine)
    path = Path(folder)
    stored = checkpoint_stores.read(path, store, engine.device, weights)
    found = {
        plain_name(name.removeprefix(MODEL)): value for name, value in stored.items() if not name.startswith(OPTIMIZER)
    }
    missing = sorted(set(weights) - set(found))
    unexpected = sorted(set(found) - set(weights) - set(aliases))
    shapes = sorted(n for n in set(weights) & set(found) if shape(weights[n]) != found[n].shape)
    # Stored as a weight of its own, which is tied here: a tied one is stored once.
    doubled = {name: aliases[name] for name in sorted(set(found) & set(aliases))}
    report: dict[str, Any] = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong_shape": shapes,
        "untied": untied(*engine.weights) | doubled,
        "loaded": not (missing or unexpected or shapes or doubled),
        "rebuilt_scaling_state": scaling,
        "untouched": [],
        "refused": "",
        "stale": [],
        "unchecked": "",
        "left_out": [],
        "digests": {},
        "optimizer_digests": {},
        "own": None,
    }
    if not report["loaded"]:
        return report
    watch = LoadWatch(engine)
    with torch.no_grad():
        # Both arms may have trained from one seed: what a load leaves out must not be right by accident.
        for each in {id(p): p for n, p in engine.model.named_parameters() if plain_name(n) in weights}.values():
            change(each, torch.neg)
    before = digests(weights)
    watch.before()
    extras = optimizer_extras.read(path)
    extra = {name.removeprefix(MODEL): extras.pop(name) for name in list(extras) if name.startswith(MODEL)}
    try:
        report["left_out"] = _fill(engine, found, aliases, extra)
        found.clear()  # before anything is computed: at 8B the copies are 15 GiB
        stored = {name: value for name, value in stored.items() if name.startswith(OPTIMIZER)}
        report["stale"], report["unchecked"] = watch.stale(), watch.unchecked
        engine.renew_scales()
        # The model has been called since, and may have put other tensors in its parameters' place: param.data = ...
        report["digests"] = digests(weights_of(engine)[0])
        report["untouched"] = untouched(before, report["digests"])
        if optimizer:
            engine.optimizer.state.clear()
            report["left_out"] += _fill_optimizer(engine, stored, extras)
            report["optimizer_digests"] = state_digests(optimizer_state_of(engine))
    except _Refused as refused:
        report.update(refused=str(refused), loaded=False)
    engine.park()
    return report


def untouched(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Weights that a load has left as they were."""
    return sorted(name for name, digest in now.items() if before.get(name) == digest)


class _Refused(Exception):
    """What a ``load_state_dict()`` raised."""


@contextmanager
def _asked(whose: object) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kind = type(whose)
        raise _Refused(
            f"load_state_dict() of {kind.__qualname__}: {type(error).__name__}: {str(error)[:600]}"
        ) from error


def _fill(
    engine: Engine, found: Mapping[str, torch.Tensor], aliases: Mapping[str, str], extra: dict[str, Any]
) -> list[str]:
    """Give the weights, and the extra state, to the model's ``load_state_dict()``; gives what has no place there."""
    model = engine.model
    values = join(found, _plain_fused(engine))
    live = {plain_name(name): each for name, each in model.named_parameters(remove_duplicate=False)}
    parted = {name: each for name, each in live.items() if is_partitioned(each)}
    for name, parameter in parted.items():
        assign(parameter, values[aliases.get(name, name)])
    entries = model.state_dict()
    state: dict[str, Any] = {}
    for key, value in entries.items():
        name = plain_name(key)
        stored = values.get(aliases.get(name, name))
        if stored is not None and name not in parted and isinstance(value, torch.Tensor):
            state[key] = placed(stored, value)
        elif name in extra:
            state[key] = extra.pop(name)
    with _asked(model):
        # As a user loads it, where all is there: a load_state_dict() of one's own may know no strict=False.
        model.load_state_dict(state, **({} if state.keys() == entries.keys() else {"strict": False}))
    return [f"{name} (no module takes it)" for name in sorted(extra)]


def _fill_optimizer(engine: Engine, stored: Mapping[str, torch.Tensor], extras: dict[str, Any]) -> list[str]:
    besides = extras.pop(BESIDES)
    optimizer = engine.optimizer
    with _asked(innermost(optimizer)):
        left = optimizer_state.load_state(engine.model, optimizer, _plain_fused(engine), stored, extras, besides)
    training_state.put_back(optimizer, besides)
    return left


def _extra_state(engine: Engine) -> dict[str, Any]:
    """Entries of the state dict that are no tensors, without a library's scaling state."""
    backend = engine.backend
    return {
        plain_name(key): value
        for key, value in engine.model.state_dict().items()
        if not isinstance(value, torch.Tensor) and backend.is_checkpointed(key) and not backend.is_scaling_state(key)
    }


def narrowed(engine: Engine, state: Mapping[str, Any]) -> dict[str, int]:
    """``Optimizer.load_state_dict`` casts state to the dtype of its parameter: digests of what arrives then."""
    dtypes = {plain_name(name): parameter.dtype for name, parameter in engine.model.named_parameters()}
    found = {}
    for key, value in state.items():
        name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
        dtype = dtypes.get(name)
        cast = dtype is not None and dtype.is_floating_point and entry != "step" and optimizer_extras.is_tensor(value)
        if cast and value.dtype != dtype:
            found[key] = value.to(dtype)
    return digests(found)


def weights_of(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """(weights to store by plain name, each storage once; second name of a tied weight -> its first; scaling state)."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    scaling: list[str] = []
    owner: dict[tuple[int, torch.Size], str] = {}
    fused = _plain_fused(engine)
    live = {plain_name(name): each for name, each in engine.model.named_parameters(remove_duplicate=False)}
    for key, found in engine.model.state_dict().items():
        name = plain_name(key)
        value = live[name] if is_partitioned(live.get(name)) else found
        if not engine.backend.is_checkpointed(key):
            continue
        if engine.backend.is_scaling_state(key):
            scaling.append(name)
            continue
        if not isinstance(value, torch.Tensor):
            continue  # _extra_state() has it
        if name in weights or name in aliases:
            raise ValueError(f"two state-dict keys have the same name {name!r} once wrapper prefixes are removed")
        parted = is_part(value)
        if not parted and hasattr(value, "__tensor_flatten__") and not value.data_ptr():
            raise UnreadableWeightError(f"{name!r} is a {type(value).__name__}, which has no storage to write")
        # A rank's shard may be empty, and then has no address.
        identity = (id(live[name]) if parted else value.data_ptr(), value.shape)
        if (value.numel() or parted) and identity in owner:
            aliases[name] = owner[identity]
            continue
        owner[identity] = name
        weights.update(split([(name, plain_shards(value))], fused))
    return weights, aliases, scaling


def _plain_fused(engine: Engine) -> FusedParams:
    """The fused parameters by plain names: without the prefixes that wrappers add."""
    return {plain_name(name): parts for name, parts in engine.fused_params.items()}


def optimizer_state_of(engine: Engine) -> dict[str, Any]:
    """What the optimizer keeps of each parameter, by plain names."""
    return optimizer_state.state_of(engine.model, engine.optimizer, _plain_fused(engine))


def state_digests(state: dict[str, Any]) -> dict[str, int]:
    """A digest of each part of :func:`optimizer_state_of`'s entries."""
    return digests({name: leaf for key, value in state.items() for name, leaf in optimizer_extras.leaves(key, value)})
