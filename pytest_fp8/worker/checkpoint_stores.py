"""Saves and loads an arm's training state, through safetensors and torch.distributed.checkpoint, key by key.

Weights keep plain names: prefixes that wrappers add (``torch.compile``: ``_orig_mod.``; data parallel: ``module.``) are
taken off, scaling state that a backend keeps beside its weights is named and left out on purpose, tensors that are one
storage under two names are stored once. A backend on a frozen base stores its adapters alone, and their number is
reported beside that of the rest. Nothing else is ever dropped: a key without a home is reported.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pytest_fp8.worker import optimizer_extras
from pytest_fp8.worker.fused_params import Joined, join, split
from pytest_fp8.worker.step import schedule_of

if TYPE_CHECKING:
    from pytest_fp8.worker.engine import Engine

WRAPPERS = ("_orig_mod.", "module.")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
WRITERS = 8
SCHEDULE = "schedule.pt"
OPTIMIZER = "optimizer/"
MODEL = "model/"


class UnreadableWeightError(TypeError):
    """A weight inside a wrapper that neither store can write."""

    fp8_cause = (
        "torchao wrapped the weight for gathering in FP8 under FSDP2 (enable_fsdp_float8_all_gather), which Accelerate "
        "asks for by default, FSDP or not; save_model() and safetensors fail on it too"
    )
    fp8_next = "set ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false, or pass AORecipeKwargs(config=...)"


class StrayParameter(RuntimeError):
    """The optimizer holds what the model no longer does."""

    fp8_cause = "it was made before the conversion put new parameters in place of its own"
    fp8_next = "make the optimizer after the conversion; the loss question names the weights that nothing trains"


def save(engine: Engine, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
    """Write the arm's state to ``folder``; gives keys, aliases, scaling state, dtypes on disk and content digests."""
    weights, aliases, scaling = weights_of(engine)
    held = dict(optimizer_state(engine)) if optimizer else {}
    state = {key: value for key, value in held.items() if optimizer_extras.is_tensor(value)}
    state_digests = _state_digests(held)
    written = engine.fault_points.stored(engine, weights)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if store == "safetensors":
        tensors = {name: value.contiguous() for name, value in {**written, **state}.items()}
        _write_safetensors(tensors, path, {"aliases": json.dumps(aliases)})
    else:
        import torch.distributed.checkpoint as dcp

        named = {MODEL + name: value for name, value in written.items()}
        # The folder is read once and removed: nothing is gained by waiting until a disk has it.
        writer = dcp.FileSystemWriter(str(path), thread_count=WRITERS, sync_files=False)
        dcp.save({**named, **state}, storage_writer=writer, no_dist=True)
    optimizer_extras.write({key: value for key, value in held.items() if key not in state}, path)
    schedule = schedule_of(engine.optimizer)
    if optimizer and schedule is not None:
        torch.save(schedule.state_dict(), path / SCHEDULE)
    engine.synchronize()
    return {
        "keys": sorted(weights),
        "wrapped": sorted(name for name in written if plain_name(name) != name),
        "aliases": aliases,
        "untied": engine.conversion.untied,
        "scaling_state": scaling,
        "frozen": sum(not engine.backend.saved(key) for key in engine.model.state_dict()),
        "on_disk": dtypes_on_disk(path, store),
        "digests": digests(weights),
        "optimizer_digests": state_digests,
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }


def load(engine: Engine, folder: str, store: str, optimizer: bool) -> dict[str, Any]:
    """Read ``folder`` into the arm; gives what was missing, what had no home, and digests of what the arm now holds.

    Loads nothing at all when a weight is missing or has no home, so that no half-loaded model trains on.
    """
    weights, aliases, scaling = weights_of(engine)
    stored = _read(Path(folder), store, engine.device)
    found = {plain_name(name): value for name, value in stored.items() if not name.startswith(OPTIMIZER)}
    missing = sorted(set(weights) - set(found))
    unexpected = sorted(set(found) - set(weights) - set(aliases))
    shapes = sorted(n for n in set(weights) & set(found) if weights[n].shape != found[n].shape)
    report: dict[str, Any] = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong_shape": shapes,
        "rebuilt_scaling_state": scaling,
        "untied": engine.conversion.untied,
        "loaded": not (missing or unexpected or shapes),
        "digests": {},
        "optimizer_digests": {},
    }
    if not report["loaded"]:
        return report
    with torch.no_grad():
        if not engine.fault_points.fill(engine, weights, stored):
            for name, parameter in weights.items():
                parameter.copy_(found[name])
    # The copies go before anything is computed: at 8B they are 15 GiB.
    found.clear()
    stored = {name: value for name, value in stored.items() if name.startswith(OPTIMIZER)}
    engine.renew_scales()
    report["digests"] = digests(weights)
    if optimizer:
        engine.optimizer.state.clear()
        if engine.fault_points.loads_optimizer():
            _load_optimizer(engine, stored, optimizer_extras.read(Path(folder)))
            _load_schedule(engine, Path(folder) / SCHEDULE)
        report["optimizer_digests"] = _state_digests(dict(optimizer_state(engine)))
    engine.park()
    return report


def plain_name(key: str) -> str:
    """A state-dict key without what wrappers add, and without this module's own section prefix.

    >>> plain_name("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    key = key.removeprefix(MODEL)
    parts = key.split(".")
    if parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    return ".".join(part for part in parts if part != "_orig_mod")


def weights_of(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """(weights to store by plain name, each storage once; second names of shared storages; scaling-state keys)."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    scaling: list[str] = []
    owner: dict[tuple[int, torch.Size], str] = {}
    joined = _plain_joined(engine)
    for key, value in engine.model.state_dict().items():
        name = plain_name(key)
        if not engine.backend.saved(key):
            continue
        if engine.backend.scaling_state(key):
            scaling.append(name)
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"state-dict entry {key!r} is a {type(value).__name__}, neither a weight nor scaling state")
        if name in weights or name in aliases:
            raise ValueError(f"two state-dict keys become the one name {name!r} when wrapper prefixes are taken off")
        if hasattr(value, "__tensor_flatten__") and not value.data_ptr():
            raise UnreadableWeightError(f"{name!r} is a {type(value).__name__}, which has no storage to write")
        identity = (value.data_ptr(), value.shape)
        if value.numel() and identity in owner:
            aliases[name] = owner[identity]
            continue
        owner[identity] = name
        weights.update(split([(name, value)], joined))
    return weights, aliases, scaling


def _plain_joined(engine: Engine) -> Joined:
    """The joined parameters, by the plain names of the live ones: without what wrappers add."""
    return {plain_name(name): parts for name, parts in engine.joined.items()}


def optimizer_state(engine: Engine) -> list[tuple[str, Any]]:
    """What the optimizer keeps, by parameter name: ``optimizer/<parameter>/<entry>``, in parameter order."""
    names = {id(parameter): plain_name(name) for name, parameter in engine.model.named_parameters()}
    joined = _plain_joined(engine)
    entries: list[tuple[str, Any]] = []
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise StrayParameter("the optimizer steps a parameter that the model does not have")
            for entry, value in engine.optimizer.state.get(parameter, {}).items():
                live = names[id(parameter)]
                whole = optimizer_extras.is_tensor(value)
                parts = (
                    split([(live, value)], joined)
                    if whole
                    else optimizer_extras.each_part_s(live, entry, value, joined)
                )
                entries += [(f"{OPTIMIZER}{name}/{entry}", part) for name, part in parts]
    return entries


def _state_digests(state: dict[str, Any]) -> dict[str, int]:
    return digests({name: leaf for key, value in state.items() for name, leaf in optimizer_extras.leaves(key, value)})


def _load_optimizer(engine: Engine, stored: dict[str, torch.Tensor], others: dict[str, Any]) -> None:
    parameters = {plain_name(name): parameter for name, parameter in engine.model.named_parameters()}
    joined = _plain_joined(engine)
    by_entry: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in stored.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        by_entry.setdefault(entry, {})[name] = value
    for entry, values in by_entry.items():
        for name, value in join(values, joined).items():
            parameter = parameters.get(name)
            if parameter is None:
                raise KeyError(f"the stored optimizer knows a parameter {name!r} that this model does not have")
            engine.optimizer.state[parameter][entry] = value.to(parameter.device)
    whole = {part: live for live, parts in joined.items() for part, _ in parts}
    for key, value in others.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        engine.optimizer.state[parameters[whole.get(name, name)]][entry] = value


def _load_schedule(engine: Engine, path: Path) -> None:
    schedule = schedule_of(engine.optimizer)
    if schedule is None or not path.is_file():
        return
    schedule.load_state_dict(torch.load(path, weights_only=True))
    for group, rate in zip(engine.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def _read(folder: Path, store: str, device: torch.device) -> dict[str, torch.Tensor]:
    if store == "safetensors":
        return _read_safetensors(folder, device)
    import torch.distributed.checkpoint as dcp

    targets = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        for name, entry in _dcp_entries(folder).items()
    }
    dcp.load(targets, checkpoint_id=str(folder), no_dist=True)
    return targets


def _write_safetensors(tensors: dict[str, torch.Tensor], folder: Path, metadata: dict[str, str]) -> None:
    """As models are published: one file, or shards and their index. Shards are written at the same time, for one file
    is bound by one core: 15 GiB took 12.7 s on an H200's host, in eight shards 8.0 s."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_BYTES)

    def write(name: str) -> None:
        save_file({key: tensors[key] for key in plan.filename_to_tensors[name]}, folder / name, metadata=metadata)

    with ThreadPoolExecutor(WRITERS) as writers:
        list(writers.map(write, plan.filename_to_tensors))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index))


def _read_safetensors(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Raises ``FileNotFoundError`` where the file, or a shard that the index names, is not there."""
    from safetensors.torch import load_file

    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [WEIGHTS]
    with ThreadPoolExecutor(WRITERS) as readers:
        parts = readers.map(lambda name: load_file(folder / name, device=str(device)), names)
        return {key: tensor for part in parts for key, tensor in part.items()}


def _dcp_entries(folder: Path) -> dict[str, Any]:
    """The store's own list of tensors. torch reads it by pickle; the folder is one that this session's arm just wrote
    and nobody else can."""
    import torch.distributed.checkpoint as dcp

    return cast(dict[str, Any], dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def dtypes_on_disk(folder: Path, store: str) -> dict[str, int]:
    """How many stored tensors have which dtype, read from the files themselves."""
    counts: dict[str, int] = {}
    if store == "safetensors":
        from safetensors import safe_open

        names = []
        for shard in sorted(folder.glob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                names += [str(file.get_slice(key).get_dtype()) for key in file.keys()]  # noqa: SIM118 - not a dict
    else:
        names = [str(entry.properties.dtype).removeprefix("torch.") for entry in _dcp_entries(folder).values()]
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """A content digest per tensor: equal bits give equal numbers, on any device. Position-sensitive, modulo 2^64."""
    result = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        size = flat.element_size()
        whole = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
        total = 0
        for start in range(0, whole.numel(), 1 << 24):
            part = whole[start : start + (1 << 24)].to(torch.int64)
            weight = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
            total = (total + int((part * weight).sum())) % (1 << 64)
        result[name] = total
    return result
