"""The two stores of a checkpoint, safetensors and torch.distributed.checkpoint, by these libraries' own writers.

Tensors go into the store. What is no tensor goes into a JSON file beside it, :func:`packed`; nothing is pickled.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from pytest_fp8.said import Told
from pytest_fp8.worker.tensors import full, is_part, is_sharded, on_host, plain_shards
from pytest_fp8.worker.training.ranks import rank, ranks

OPTIMIZER = "optimizer/"
"""Prefix of the names of what an optimizer keeps: ``optimizer/<parameter>/<entry>``."""
DATA = "data.json"
MOST_ON_HOST = 17_000_000_000
"""Bytes of a checkpoint that are copied to the host at once before they are written: 8B's weights. A larger one is
copied by its writer, tensor by tensor, which takes longer: docs/findings.md, "What an arm's own work takes"."""
SCALARS = (bool, int, float, str, type(None))
KINDS = {kind.__name__: kind for kind in (Counter, OrderedDict, dict, list, tuple)}
"""Containers, a subclass before its base."""
DEEPEST = 8
"""Levels of containers: one may hold itself."""


class UnstorableStateError(Told, TypeError):
    """An entry of the optimizer's state is of a kind that cannot be stored or compared."""


def write(folder: Path, store: str, weights: Mapping[str, torch.Tensor], tree: Any = None) -> None:
    """Write ``weights``, and ``tree``, which holds tensors and data, to ``store``: ``safetensors`` or ``dcp``. Of
    several ranks each writes its shards to DCP, and rank 0 the whole to safetensors."""
    leaves: dict[str, Any] = {}
    pack = packed("", tree, leaves)
    tensors = {**weights, **{name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}}
    values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    text = json.dumps({"weights": list(weights), "tree": pack, "values": values})
    folder.mkdir(parents=True, exist_ok=True)
    if store == "safetensors":
        from huggingface_hub import save_torch_state_dict

        if whole := _on_first_rank(tensors):
            save_torch_state_dict(whole, folder)
    else:
        import torch.distributed.checkpoint as dcp

        # DCP writes shards as they are, and knows nothing of ZeRO-3's parts.
        entries = {name: value if is_sharded(value) else full(value) for name, value in tensors.items()}
        # The folder is read once and removed, so there is no need to wait until the disk has it.
        writer = dcp.FileSystemWriter(str(folder), thread_count=8, sync_files=False)
        dcp.save(_staged(entries), storage_writer=writer, no_dist=ranks() == 1)
    if rank() == 0:
        (folder / DATA).write_text(text)


def _on_first_rank(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0, nothing on the others. Sharded ones go to the host one by one: the GPU holds no whole
    model. Of tensors that share memory each gets its own: the writer leaves out all but one."""
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = full(tensor)
        if rank() == 0:
            whole[name] = value.cpu() if is_part(tensor) else value
    whole = _staged(whole)
    memory = Counter(value.untyped_storage().data_ptr() for value in whole.values())
    return {name: v.clone() if memory[v.untyped_storage().data_ptr()] > 1 else v for name, v in whole.items()}


def _staged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    size = sum(each.numel() * each.element_size() for each in tensors.values())
    # Of several ranks each writes a part, and would copy all.
    return on_host(tensors) if ranks() == 1 and size <= MOST_ON_HOST else tensors


def read(
    folder: Path, store: str, device: torch.device, held: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[dict[str, torch.Tensor], Any]:
    """What :func:`write` was given: tensors on ``device``, and single numbers on the host, where torch's optimizers
    keep counts of steps. ``held``: live weights by plain names; what DCP has of a sharded one, its optimizer state too,
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
            weight = held.get(name.removeprefix(OPTIMIZER).rpartition("/")[0] if name.startswith(OPTIMIZER) else name)
            dtype = entry.properties.dtype
            if weight is not None and is_sharded(weight) and weight.shape == entry.size:
                tensors[name] = torch.empty_like(plain_shards(weight), dtype=dtype)
            else:
                tensors[name] = torch.empty(entry.size, dtype=dtype, device=device if entry.size else "cpu")
        dcp.load(tensors, checkpoint_id=str(folder), no_dist=ranks() == 1)
    data = json.loads((folder / DATA).read_text())
    weights = {name: tensors.pop(name) for name in data["weights"] if name in tensors}
    return weights, unpacked(data["tree"], {**tensors, **data["values"]})


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


def packed(name: str, value: Any, leaves: dict[str, Any], depth: int = 0) -> Any:
    """``value`` as JSON that refers to its leaves by names; the leaves go into ``leaves``: tensors, numbers, text, and
    objects that no checkpoint can hold. A tensor whose class wraps others is taken apart."""
    kind = next((kind for kind, of in KINDS.items() if isinstance(value, of)), None)
    if kind and depth < DEEPEST:
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        if all(isinstance(key, SCALARS) for key, _ in pairs):
            return {kind: [[key, packed(_inside(name, key), part, leaves, depth + 1)] for key, part in pairs]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and not is_tensor(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        held = packed(name, ({each: getattr(value, each) for each in names}, context), leaves, depth + 1)
        return {"wrapped": [class_name(type(value)), held, list(value.shape), list(value.stride())]}
    while name in leaves:
        name += "'"
    leaves[name] = value
    return name


def unpacked(pack: Any, leaves: Mapping[str, Any]) -> Any:
    """What :func:`packed` was given. The class of a tensor must be one that its library has declared safe to load, as
    torchao does; raises :class:`UnstorableStateError` for another."""
    if isinstance(pack, str):
        return leaves[pack]
    ((kind, parts),) = pack.items()
    if kind == "dtype":
        return getattr(torch, parts)
    if kind == "wrapped":
        of, held, shape, stride = parts
        declared = torch.serialization.get_safe_globals()
        safe: dict[str, Any] = {class_name(each): each for each in declared if isinstance(each, type)}
        if of not in safe:
            raise UnstorableStateError(
                f"the optimizer or its schedule keeps {of}, which is not among torch.serialization.add_safe_globals"
            )
        return safe[of].__tensor_unflatten__(*unpacked(held, leaves), shape, stride)
    pairs = [(key, unpacked(part, leaves)) for key, part in parts]
    return KINDS[kind](dict(pairs) if issubclass(KINDS[kind], dict) else [part for _, part in pairs])


def _inside(name: str, key: Any) -> str:
    """``base_lrs[0]``, ``state.step``."""
    return f"{name}[{key}]" if not isinstance(key, str) else f"{name}.{key}" if name else key


def class_name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def is_tensor(value: Any) -> bool:
    """Whether every store takes the value as it is: a tensor, and not of a class that wraps others, but for shards."""
    return isinstance(value, torch.Tensor) and (is_sharded(value) or not hasattr(value, "__tensor_flatten__"))


def is_data(value: Any) -> bool:
    """Whether a value is data alone. Parameters are not: they are the model's."""
    leaves: dict[str, Any] = {}
    packed("", value, leaves)
    return all(type(leaf) in (torch.Tensor, *SCALARS) for leaf in leaves.values())


def data_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries that are data alone."""
    return {key: value for key, value in entries.items() if is_data(value)}
