"""Saves and loads an arm's training state: weights by plain names, optimizer, schedule.

Tied tensors are stored once. Scaling state that a backend keeps beside its weights is left out on purpose and listed.
A backend with a frozen base stores its adapters only, and the number of the others is reported. What is no tensor is
carried where JSON holds it, and else listed. Nothing else is left out: a stored key that the arm has no weight for is
reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.codes import R
from pytest_fp8.worker.answers.load_watch import LoadWatch
from pytest_fp8.worker.state import checkpoint_stores, extra_state, optimizer_extras, optimizer_state, training_state
from pytest_fp8.worker.state.checkpoint_stores import MODEL, OPTIMIZER, digests, dtypes_on_disk
from pytest_fp8.worker.state.fused_params import plain_name, split
from pytest_fp8.worker.state.shards import assign, is_part, plain_shards
from pytest_fp8.worker.training.ranks import rank, wait_for_all
from pytest_fp8.worker.training.zero import is_partitioned, shape
from pytest_fp8.worker.watch.ledger_weights import untied

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


class UnreadableWeightError(TypeError):
    """Neither store can write a weight, because a tensor class wraps it."""

    fp8_code = R.UNSTORABLE
    fp8_cause = (
        "torchao wrapped the weight for gathering in FP8 under FSDP2 (enable_fsdp_float8_all_gather), which Accelerate "
        "asks for by default, FSDP or not; save_model() and safetensors fail on it too"
    )
    fp8_next = "set ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false, or pass AORecipeKwargs(config=...)"


def save(engine: Engine, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
    """Write the arm's state to ``folder``; gives keys, scaling state, dtypes on disk and content digests."""
    weights, aliases, scaling = weights_of(engine)
    extra, left_out = extra_state.split(extra_state.entries(engine.model, engine.backend))
    held = optimizer_state_of(engine) if optimizer else {}
    state = {key: value for key, value in held.items() if optimizer_extras.is_tensor(value)}
    of_optimizer = state_digests(held)
    written = engine.fault_points.stored(engine, weights)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    checkpoint_stores.write(path, store, written, state, aliases)
    if rank() == 0:
        extra_state.write(extra, path)
        optimizer_extras.write({key: value for key, value in held.items() if key not in state}, path)
        if optimizer:
            training_state.write(engine.optimizer, path)
            optimizer_state.save_schedule(engine.optimizer, path)
    engine.synchronize()
    wait_for_all()
    return {
        "keys": sorted(weights),
        "wrapped": sorted(name for name in written if plain_name(name) != name),
        "untied": untied(*engine.weights),
        "scaling_state": scaling,
        "left_out": left_out,
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
        "stale": [],
        "left_out": [],
        "digests": {},
        "optimizer_digests": {},
        "own": None,
    }
    if not report["loaded"]:
        return report
    report["stale"] = LoadWatch(engine).stale_after_reload()
    # The model has been called since, and may have put other tensors in its parameters' place: param.data = ...
    weights, _, _ = weights_of(engine)
    with torch.no_grad():
        if not engine.fault_points.fill(engine, weights, stored):
            for name, parameter in weights.items():
                assign(parameter, found[name])
    # Free the copies before anything is computed: at 8B they are 15 GiB.
    found.clear()
    stored = {name: value for name, value in stored.items() if name.startswith(OPTIMIZER)}
    report["left_out"] = extra_state.read(engine.model, path)
    engine.renew_scales()
    report["digests"] = digests(weights)
    if optimizer:
        engine.optimizer.state.clear()
        if engine.fault_points.loads_optimizer():
            extras = optimizer_extras.read(path)
            optimizer_state.load_state(engine.model, engine.optimizer, _plain_fused(engine), stored, extras)
            training_state.read(engine.optimizer, path)
            optimizer_state.load_schedule(engine.optimizer, path)
        report["optimizer_digests"] = state_digests(optimizer_state_of(engine))
    engine.park()
    return report


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
            continue  # extra_state has it
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
