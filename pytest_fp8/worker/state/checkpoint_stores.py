"""The two stores of a checkpoint, safetensors and torch.distributed.checkpoint: writing, reading, what is on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from types import MappingProxyType
from typing import Any, cast

import torch

from pytest_fp8.worker.state.shards import full, is_part, is_sharded, plain_shards
from pytest_fp8.worker.training.host_copies import on_host
from pytest_fp8.worker.training.ranks import rank, ranks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
WRITERS = 8
MOST_ON_HOST = 17_000_000_000
"""Bytes of a DCP checkpoint that are copied to the host before they are written: 8B's weights. A larger one DCP writes
tensor by tensor, which takes longer."""
MODEL, OPTIMIZER = "model/", "optimizer/"
"""Prefixes of the keys on disk: of weights in a DCP store, and of ``optimizer/<parameter>/<entry>`` in both."""


def write(
    folder: Path,
    store: str,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
) -> None:
    """Write weights and optimizer state to ``folder``. ``store``: ``safetensors`` or ``dcp``. ``aliases``: second names
    of tied weights, which only safetensors' metadata can hold. Of several ranks each writes its shards to DCP, and rank
    0 the whole to safetensors."""
    if store == "safetensors":
        tensors = whole_on_first_rank({**weights, **state})
        if rank() == 0:
            write_safetensors(tensors, folder, {"aliases": json.dumps(aliases)})
        return
    import torch.distributed.checkpoint as dcp

    # DCP writes shards as they are, and knows nothing of ZeRO-3's parts.
    named = {MODEL + name: value if is_sharded(value) else full(value) for name, value in weights.items()}
    # The folder is read once and removed, so there is no need to wait until the disk has it.
    writer = dcp.FileSystemWriter(str(folder), thread_count=WRITERS, sync_files=False)
    entries = {**named, **state}
    size = sum(each.numel() * each.element_size() for each in entries.values())
    # Of several ranks each writes a part, and would copy all.
    if ranks() == 1 and size <= MOST_ON_HOST:
        entries = on_host(entries)
    dcp.save(entries, storage_writer=writer, no_dist=ranks() == 1)


def whole_on_first_rank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors in plain memory on rank 0, nothing on the others. Sharded ones go to the host one by one: the GPU
    holds no whole model."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = full(tensor)
        if rank() == 0:
            whole[name] = (value.cpu() if is_part(tensor) else value).contiguous()
    return whole


def read(
    folder: Path, store: str, device: torch.device, held: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """All tensors of a store, by the keys on disk, on ``device``. ``held``: live weights by plain names; what DCP has
    of a sharded one, its optimizer state too, is read into shards."""
    if store == "safetensors":
        return read_safetensors(folder, device)
    import torch.distributed.checkpoint as dcp

    def target(name: str, entry: Any) -> torch.Tensor:
        of_optimizer, _, _ = name.removeprefix(OPTIMIZER).rpartition("/")
        weight = held.get(of_optimizer if name.startswith(OPTIMIZER) else name.removeprefix(MODEL))
        if weight is not None and is_sharded(weight) and weight.shape == entry.size:
            return torch.empty_like(plain_shards(weight), dtype=entry.properties.dtype)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    targets = {name: target(name, entry) for name, entry in _dcp_entries(folder).items()}
    dcp.load(targets, checkpoint_id=str(folder), no_dist=ranks() == 1)
    return targets


def write_safetensors(tensors: dict[str, torch.Tensor], folder: Path, metadata: dict[str, str]) -> None:
    """Write as models are published: one file, or shards and their index. Shards are written at the same time, because
    one core bounds one file: docs/findings.md, "What an arm's own work takes"."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_BYTES)
    room = Semaphore(WRITERS)

    def write_shard(name: str, shard: dict[str, torch.Tensor]) -> None:
        try:
            save_file(shard, folder / name, metadata=metadata)
        finally:
            room.release()

    with ThreadPoolExecutor(WRITERS) as writers:
        written = []
        for name, keys in plan.filename_to_tensors.items():
            # The host holds no more shards than are being written.
            room.acquire()
            written.append(writers.submit(write_shard, name, on_host({key: tensors[key] for key in keys})))
        for each in written:
            each.result()
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index))


def read_safetensors(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Raises ``FileNotFoundError`` where the file, or a shard that the index names, is missing."""
    from safetensors.torch import load_file

    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [WEIGHTS]
    with ThreadPoolExecutor(WRITERS) as readers:
        parts = readers.map(lambda name: load_file(folder / name, device=str(device)), names)
        return {key: tensor for part in parts for key, tensor in part.items()}


def _dcp_entries(folder: Path) -> dict[str, Any]:
    """The store's own list of tensors. torch reads it by pickle, so the folder must be one that an arm of this session
    wrote and that no other user can write to."""
    import torch.distributed.checkpoint as dcp

    return cast(dict[str, Any], dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def dtypes_on_disk(folder: Path, store: str) -> dict[str, int]:
    """dtype -> number of stored tensors, read from the files themselves; of other kinds of files nothing."""
    counts: dict[str, int] = {}
    if store == "safetensors":
        from safetensors import safe_open

        names = []
        for shard in sorted(folder.rglob("*.safetensors")):
            with safe_open(shard, framework="pt") as file:
                names += [str(file.get_slice(key).get_dtype()) for key in file.keys()]  # noqa: SIM118 - not a dict
    else:
        names = [str(entry.properties.dtype).removeprefix("torch.") for entry in _dcp_entries(folder).values()]
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A content digest of each tensor: equal bits give equal numbers on any device. It depends on the positions of the
    elements; modulo 2^64."""
    result = {}
    for name, tensor in tensors.items():
        flat = full(tensor).detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        # Of 8 bytes at once, sign bits would fall out of the sum.
        whole = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
        total = 0
        for start in range(0, whole.numel(), 1 << 24):
            part = whole[start : start + (1 << 24)].to(torch.int64)
            weight = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) % 65_521 + 1
            total = (total + int((part * weight).sum())) % (1 << 64)
        result[name] = total
    return result
