"""The two stores of a checkpoint, safetensors and torch.distributed.checkpoint, by these libraries' own writers.

Tensors go into the store. What is no plain tensor goes into a file beside it, by ``torch.save``, and is read with
``weights_only=True``: plain data, and classes that their library has declared safe.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from pytest_fp8.worker.tensors import Sharded, held, on_host
from pytest_fp8.worker.training.ranks import rank, ranks
from pytest_fp8.zoo.batch import with_tensors

OPTIMIZER = "optimizer/"
"""Prefix of the names of what an optimizer keeps: ``optimizer/<parameter>/<entry>``."""
REST = "rest.pt"
MOST_ON_HOST = 17_000_000_000
"""Bytes of a checkpoint that are copied to the host at once before they are written: 8B's weights. A larger one is
copied by its writer, tensor by tensor. 45 GiB into memory that is page-locked for it took more than 30 s."""
SCALARS = (bool, int, float, str, type(None), torch.dtype)
CONTAINERS = (dict, list, tuple, OrderedDict, Counter, torch.Size)
DEEPEST = 8
"""Levels of containers: one may hold itself."""


def write(folder: Path, store: str, weights: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Write ``weights``, and ``state``, tensors and data by other names, to ``store``: ``safetensors`` or ``dcp``. Of
    several ranks each writes its shards to DCP, and rank 0 the whole to safetensors."""
    tensors = {**weights, **{name: value for name, value in state.items() if is_tensor(value)}}
    rest = {name: value for name, value in state.items() if name not in tensors}
    rest = with_tensors(rest, lambda tensor: held(tensor).whole())
    folder.mkdir(parents=True, exist_ok=True)
    if store == "safetensors":
        from huggingface_hub import save_torch_state_dict

        if whole := _on_first_rank(tensors):
            save_torch_state_dict(whole, folder)
    else:
        import torch.distributed.checkpoint as dcp

        # DCP writes shards as they are, and knows of no other parts.
        entries = {name: value if Sharded.has(value) else held(value).whole() for name, value in tensors.items()}
        # The folder is read once and removed, so there is no need to wait until the disk has it.
        writer = dcp.FileSystemWriter(str(folder), thread_count=8, sync_files=False)
        dcp.save(_staged(entries), storage_writer=writer, no_dist=ranks() == 1)
    if rank() == 0:
        torch.save({"weights": list(weights), "rest": rest}, folder / REST)


def _on_first_rank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0, nothing on the others. Sharded ones go to the host one by one: the GPU holds no whole
    model. Of tensors that share memory each gets its own: the writer leaves out all but one."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = held(tensor).whole()
        if rank() == 0:
            whole[name] = value.cpu() if held(tensor).is_part else value
    whole = _staged(whole)
    memory = Counter(value.untyped_storage().data_ptr() for value in whole.values())
    return {name: v.clone() if memory[v.untyped_storage().data_ptr()] > 1 else v for name, v in whole.items()}


def _staged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    # Of several ranks each writes a part, and would copy all.
    return on_host(tensors) if ranks() == 1 and size <= MOST_ON_HOST else tensors


def read(
    folder: Path, store: str, device: torch.device, live: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What :func:`write` was given: tensors on ``device``, and single numbers on the host, where torch's optimizers
    keep counts of steps. ``live``: live weights by plain names; what DCP has of a sharded one, its optimizer state too,
    is read into shards."""
    if store == "safetensors":
        from safetensors.torch import load_file

        files = sorted(folder.glob("*.safetensors"))
        found = {name: value for file in files for name, value in load_file(file, device=str(device)).items()}
        tensors = {name: value if value.dim() else value.cpu() for name, value in found.items()}
    else:
        import torch.distributed.checkpoint as dcp

        tensors = {}
        for name, entry in _dcp_entries(folder).items():
            weight = live.get(name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else name)
            dtype = entry.properties.dtype
            if weight is not None and Sharded.has(weight) and weight.shape == entry.size:
                tensors[name] = torch.empty_like(held(weight).stored(), dtype=dtype)
            else:
                tensors[name] = torch.empty(entry.size, dtype=dtype, device=device if entry.size else "cpu")
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=ranks() == 1)
    # What was on rank 0's GPU is on this rank's.
    kept = torch.load(folder / REST, map_location={"cuda:0": str(device)}, weights_only=True)
    weights = {name: tensors.pop(name) for name in kept["weights"] if name in tensors}
    return weights, {**kept["rest"], **tensors}


def _dcp_entries(folder: Path) -> dict[str, Any]:
    """DCP's own list of tensors. torch reads it by pickle, so the folder must be one that an arm of this session wrote
    and that no other user can write to."""
    import torch.distributed.checkpoint as dcp

    return cast(dict[str, Any], dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def dtypes_on_disk(folder: Path, store: str) -> dict[str, str]:
    """Tensor -> its dtype, read from the files themselves; of other kinds of files nothing."""
    if store == "dcp":
        entries = _dcp_entries(folder).items()
        return {name: str(entry.properties.dtype).removeprefix("torch.") for name, entry in entries}
    from safetensors import safe_open

    found: dict[str, str] = {}
    for shard in sorted(folder.rglob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            found |= {key: str(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118 - not a dict
    return found


# -- what is no plain tensor ------------------------------------------------------------------------------------------


def leaves(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Each tensor, number, text or other object in ``value`` by a name: ``base_lrs[0]``, ``state.step``. A tensor whose
    class wraps others is taken apart."""
    if isinstance(value, torch.Tensor) and not is_tensor(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        value = {each: getattr(value, each) for each in names} | {"context": context}
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if type(value) in CONTAINERS else ())
    if type(value) in CONTAINERS and depth < DEEPEST and all(isinstance(key, SCALARS) for key, _ in pairs):
        for key, part in pairs:
            inside = f"{name}[{key}]" if not isinstance(key, str) else f"{name}.{key}" if name else key
            yield from leaves(inside, part, depth + 1)
    else:
        yield name, value


def class_name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def is_tensor(value: Any) -> bool:
    """Whether every store takes the value as it is: a tensor, and not of a class that wraps others, but for shards."""
    return isinstance(value, torch.Tensor) and (Sharded.has(value) or not hasattr(value, "__tensor_flatten__"))


def data_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries that are data alone. Parameters are not: they are the model's."""
    kinds = (torch.Tensor, *SCALARS)
    return {key: value for key, value in entries.items() if all(type(leaf) in kinds for _, leaf in leaves("", value))}
