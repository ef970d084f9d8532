"""What an optimizer keeps that is no plain tensor: numbers, text, lists and dicts, tensors of a class of their own.

Such entries go into one file beside the tensors and come back as what they were: a step count that is an integer stays
one, and torchao's 8-bit states keep their class.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_fp8.worker.fused_params import Joined

REST = "optimizer_rest.pt"
_PLAIN = (bool, int, float, str, type(None))


class UnstorableStateError(TypeError):
    """An entry of the optimizer's state of which nobody can tell how it is stored, or how two are compared."""

    fp8_cause = "stored, loaded and compared are tensors, numbers, text, and lists, tuples and dicts of them"
    fp8_next = (
        "keep one of these in optimizer.state, and what else the optimizer needs as its own attribute; or ask without "
        "the optimizer: @pytest.mark.fp8(resume=False)"
    )


def is_tensor(value: Any) -> bool:
    """Whether any store takes this as it is: not so a tensor of a class that holds others."""
    return isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__")


def leaves(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``value`` consists of, by name, as tensors to take a digest of; a number or a text as its own letters.

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


def each_part_s(live: str, entry: str, value: Any, joined: Joined) -> list[tuple[str, Any]]:
    """(plain name, value) for each part of a live weight: a number or a text is each part's own. Raises
    :class:`UnstorableStateError` for tensors of a weight of several layers, whose rows nobody knows."""
    if live in joined and _holds_tensors(value):
        kind = type(value).__name__
        raise UnstorableStateError(f"{live}/{entry} is a {kind} of tensors, and the weight is that of several layers")
    return [(name, value) for name, _ in joined.get(live, ((live, None),))]


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(_holds_tensors(part) for part in parts)


def write(rest: dict[str, Any], folder: Path) -> None:
    if rest:
        torch.save(rest, folder / REST)


def read(folder: Path) -> dict[str, Any]:
    """What :func:`write` wrote. A tensor's class is made only where its library has declared it safe to load, as
    torchao does; raises :class:`UnstorableStateError` for another."""
    path = folder / REST
    try:
        return torch.load(path, weights_only=True) if path.is_file() else {}
    except pickle.UnpicklingError as error:
        refused = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        raise UnstorableStateError(
            f"the optimizer's state holds {refused}, which is not among torch.serialization.add_safe_globals"
        ) from error
