"""What an optimizer keeps that is no plain tensor: numbers, text, lists, dicts, and tensors of a class of their own.

These entries go into one file beside the tensors and come back unchanged: a step count that is an integer stays one,
and torchao's 8-bit states keep their class.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.said import Told
from pytest_fp8.worker.state.shards import is_sharded

FILE = "optimizer_extras.pt"
_PLAIN = (bool, int, float, str, type(None))


class UnstorableStateError(Told, TypeError):
    """An entry of the optimizer's state is of a kind that cannot be stored or compared."""


def is_tensor(value: Any) -> bool:
    """Whether every store takes the value as it is: a tensor, and not of a class that wraps others, but for shards."""
    return isinstance(value, torch.Tensor) and (is_sharded(value) or not hasattr(value, "__tensor_flatten__"))


def leaves(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each part of ``value``, to take a digest of; numbers and text as the bytes of their ``repr``.

    Raises :class:`UnstorableStateError`.
    """
    if is_tensor(value):
        yield key, value
    elif isinstance(value, torch.Tensor):
        for part in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from leaves(f"{key}.{part}", getattr(value, part))
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(f"{key}[{name!r}]", part)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from leaves(f"{key}[{index}]", part)
    elif isinstance(value, _PLAIN):
        yield key, torch.tensor(list(repr(value).encode()), dtype=torch.uint8)
    else:
        kind = type(value)
        raise UnstorableStateError(f"{key} is a {kind.__module__}.{kind.__qualname__}, which no checkpoint can hold")


def for_each_part(live: str, entry: str, value: Any, fused: FusedParams) -> list[tuple[str, Any]]:
    """[(plain name, value)] for the parts of the live parameter: each part of a fused one gets the same value.

    Raises :class:`UnstorableStateError` where a fused parameter's value holds tensors: their rows are not known.
    """
    if live in fused and _holds_tensors(value):
        kind = type(value).__name__
        raise UnstorableStateError(f"{live}/{entry} is a {kind} of tensors, and the weight is that of several layers")
    return [(name, value) for name, _ in fused.get(live, ((live, None),))]


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(_holds_tensors(part) for part in parts)


def write(entries: dict[str, Any], folder: Path) -> None:
    torch.save(entries, folder / FILE)


def read(folder: Path) -> dict[str, Any]:
    """What :func:`write` wrote. A tensor's class is loaded only where its library has declared it safe, as torchao
    does; raises :class:`UnstorableStateError` for another."""
    path = folder / FILE
    try:
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]
    except pickle.UnpicklingError as error:
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        raise UnstorableStateError(
            f"the optimizer or its schedule keeps {refused}, which is not among torch.serialization.add_safe_globals"
        ) from error
