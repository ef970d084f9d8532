"""The tensors in a value, whatever holds them: dicts, lists, tuples, dataclasses, objects; and their padding."""

from __future__ import annotations

import copy
import sys
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEEPEST = 6
"""Levels of holders that are searched."""
_SEQUENCES = (list, tuple, deque, UserList)


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the batch in which each tensor is what ``change`` gives for it. What holds no tensor stays itself."""
    return with_named_tensors(batch, lambda _, tensor: change(tensor))


def with_named_tensors(batch: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """The same; ``change`` is given the name of the tensor's own entry as well."""
    return _rebuilt(batch, "", change, {})


def tensors_of(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in a value with its name there, in order: ``inner.x``, ``0``; the value itself has no name."""
    yield from _found(value, "", frozenset())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The same without names."""
    yield from (tensor for _, tensor in tensors_of(value))


def storage_of(content: bytes, dtype: Any) -> Any:
    """A storage of torch's, as a tensor that a workload's functions hold comes to an arm. ``content``: the bytes of the
    whole storage; ``dtype``: of its elements."""
    import torch

    values = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=dtype, _internal=True)


def _rebuilt(value: Any, name: str, change: Callable[[str, torch.Tensor], torch.Tensor], made: dict[int, Any]) -> Any:
    """``made``: the copies of the holders around it, by the ids of these."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(name, value)
    if id(value) in made:
        return made[id(value)]
    if next(tensors_in(value), None) is None:
        return value
    read_only = isinstance(value, tuple) or (isinstance(value, Mapping) and not isinstance(value, MutableMapping))
    copied: Any = None if read_only else copy.copy(value)
    if not read_only:
        made[id(value)] = copied
    parts = {key: _rebuilt(part, str(key), change, made) for key, part in _parts(value)}
    if isinstance(value, tuple):
        # A named tuple takes its values as separate arguments.
        return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())
    if read_only:
        return type(value)(parts)
    for key, part in parts.items():
        if isinstance(value, (MutableMapping, *_SEQUENCES)):
            copied[key] = part
        else:
            # A frozen dataclass refuses setattr.
            object.__setattr__(copied, key, part)
    if isinstance(value, dict) and getattr(value, "__dict__", None) is value:
        copied.__dict__ = copied  # its entries are its attributes
    return copied


def _found(value: Any, name: str, above: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif id(value) not in above and len(above) <= DEEPEST:
        for key, part in _parts(value):
            yield from _found(part, f"{name}.{key}" if name else str(key), above | {id(value)})


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Names and values of what a holder of tensors holds; nothing of all else.

    An object counts by its attributes, unless it is a module, a model, a function, or of Python's own or numpy's
    classes.
    """
    import torch

    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value)) if not hasattr(value, "_fields") else list(zip(value._fields, value, strict=True))
    if isinstance(value, (torch.nn.Module, ModuleType, type)) or callable(value):
        return []
    top = type(value).__module__.partition(".")[0]
    if top in ("numpy", "builtins") or (top in sys.stdlib_module_names and not isinstance(value, SimpleNamespace)):
        return []
    # What copy and pickle see of an object: a dict of its attributes, with __slots__ a pair of two dicts.
    held: Any = object.__getstate__(value)
    return [item for each in (held if isinstance(held, tuple) else [held]) for item in (each or {}).items()]


# -- padding -----------------------------------------------------------------------------------------------------------

IGNORED = -100
"""The label that cross entropy ignores, in torch and in transformers."""
FILL = {"labels": IGNORED, "attention_mask": 0}
"""Value of padded places, by the entry's name."""


def pad_to_multiple(batch: Any, multiple: int = 16, *, pad_id: int = 0, ignore_index: int = IGNORED) -> Any:
    """A copy of the batch, padded at its end until its number of rows is a multiple of ``multiple``.

    A dict, a tokenizer's BatchEncoding, or an object with such entries holds tensors of shape [batch, seq] or
    [batch, seq, ...]: the sequence is padded
    on the right until batch x seq is a multiple. ``labels`` are padded with ``ignore_index``, ``attention_mask`` with
    0, ``input_ids`` with ``pad_id`` and all else with 0; entries without a sequence of that length stay as they are.
    The loss does not change: padded places have no label, and in a causal model no real place attends to them. A
    bidirectional model needs an ``attention_mask`` in the batch.

    A tensor of shape [rows, ...] gets rows of zeros, and has at least ``multiple`` rows in the end: some kernels refuse
    the empty input of an expert that no token was sent to. Zero rows give zero gradients::

        rows = pad_to_multiple(x[chosen])
        y = expert(rows)[: chosen.numel()]

    Raises ``ValueError`` for a batch without a sequence.
    """
    import torch

    if isinstance(batch, torch.Tensor):
        missing = max(multiple, _up(batch.shape[0], multiple)) - batch.shape[0]
        return torch.cat([batch, batch.new_zeros(missing, *batch.shape[1:])]) if missing else batch
    entries = {name.rpartition(".")[2]: tensor for name, tensor in tensors_of(batch)}
    leader = next((entries[name] for name in ("input_ids", "inputs_embeds", "labels") if name in entries), None)
    if leader is None or leader.dim() < 2:
        raise ValueError(
            "pad_to_multiple looks for the sequence in input_ids, inputs_embeds or labels of shape [batch, seq, ...]; "
            f"this {type(batch).__name__} has "
            + (", ".join(f"{name} {tuple(t.shape)}" for name, t in entries.items()) or "no tensor")
        )
    rows, seq = leader.shape[:2]
    wanted = next(length for length in range(seq, seq + multiple + 1) if rows * length % multiple == 0)
    fill = {**FILL, "labels": ignore_index, "input_ids": pad_id}

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2 or value.shape[:2] != (rows, seq) or wanted == seq:
            return value
        more = value.new_full((rows, wanted - seq, *value.shape[2:]), fill.get(name, 0))
        return torch.cat([value, more], dim=1)

    return with_named_tensors(batch, padded)


def _up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple
