"""Entries of a state dict that are no tensors, as what ``get_extra_state()`` of a user's module gives.

What JSON gives back unchanged is carried beside the weights. Anything else would need pickle, which nothing here loads:
it is left out, and named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pytest_fp8.backends.base import Backend
from pytest_fp8.worker.state.fused_params import plain_name

FILE, KEY = "extra_state.json", "_extra_state"


def entries(model: torch.nn.Module, backend: Backend) -> dict[str, Any]:
    """By plain names, without a library's scaling state."""
    return {
        plain_name(key): value
        for key, value in model.state_dict().items()
        if not isinstance(value, torch.Tensor) and backend.is_checkpointed(key) and not backend.is_scaling_state(key)
    }


def split(held: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What is carried of :func:`entries`, and why each of the others is not."""
    carried = {key: value for key, value in held.items() if _is_extra(key) and _is_json(value)}
    left = [(key, value) for key, value in held.items() if key not in carried]
    return carried, [f"{key} (a {type(value).__name__} that JSON does not hold)" for key, value in left]


def write(carried: dict[str, Any], folder: Path) -> None:
    """Write it to ``folder``; no file where there is nothing."""
    if carried:
        (folder / FILE).write_text(json.dumps(carried))


def read(model: torch.nn.Module, folder: Path) -> list[str]:
    """Give each module what :func:`write` wrote of it, by ``set_extra_state()``; what has no module, and why."""
    path = folder / FILE
    found = json.loads(path.read_text()) if path.is_file() else {}
    for name, module in model.named_modules():
        key = plain_name(f"{name}.{KEY}" if name else KEY)
        if key in found and type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            module.set_extra_state(found.pop(key))
    return [f"{key} (no module takes it)" for key in sorted(found)]


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == KEY


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
