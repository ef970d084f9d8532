"""Does scaling state come back from FP8 to FP8? Written with torch.distributed.checkpoint, reset, loaded, compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.checkpoints.evidence import Scales
from pytest_fp8.worker.checkpoint import stores
from pytest_fp8.worker.tensors import digests, plain_name
from pytest_fp8.worker.training.ranks import every_rank_s

if TYPE_CHECKING:
    from pytest_fp8.backends.base import Backend
    from pytest_fp8.worker.run.engine import Engine


def carry_scales(engine: Engine, folder: Path) -> Scales:
    """Write it, lose it, load it. What was loaded stays: the arm goes on with it.

    Every rank writes and reads. Of state that is no shard the store keeps one rank's copy, as a user's does.
    """
    backend, model = engine.backend, engine.model
    stored = _digests(backend, model.named_modules())
    state = {key: value for key, value in model.state_dict().items() if backend.is_scaling_state(key)}
    told = Scales(stored)
    if not stored or not state:
        return told
    try:
        stores.write(folder, "dcp", state)
        found, _ = stores.read(folder, "dcp", torch.device("cpu"))
        _require_ours(state, found)
        backend.reset_scaling(model)
        told = replace(told, reset=_digests(backend, model.named_modules()))
        refused = _load(backend, model, found)
        told = replace(told, refused=refused, loaded=_digests(backend, model.named_modules()))
        fresh = dict(_new_layers(backend, model, found))
        no_place = sum(new.get_extra_state().numel() != found[_key(name)].numel() for name, new in fresh.items())
        told = replace(told, no_place=no_place)
        with backend.trusting_scaling_state():
            for name, new in fresh.items():
                new.set_extra_state(found[_key(name)])
        return replace(told, fresh=_digests(backend, fresh.items()))
    except Exception as error:  # whatever the library or the store says of its own state is told, and is no arm's error
        return replace(told, failed=f"{type(error).__name__}: {error}")


def _digests(backend: Backend, modules: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """``<layer> <tensor>`` -> digest of its bits."""
    layers = ((plain_name(name), module) for name, module in modules if backend.is_fp8_layer(module))
    kept = {name: backend.scaling(layer) for name, layer in layers}
    return digests({f"{n} {what}": t for n, scaling in kept.items() if scaling for what, t in scaling.tensors.items()})


def _require_ours(state: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Libraries unpickle what they load here: it must be, to the bit, what one of this arm's ranks wrote just now."""
    written = every_rank_s(digests(state))
    others = [key for key, digest in digests(found).items() if digest not in [mine.get(key) for mine in written]]
    if others:
        raise ValueError(f"the store holds other bytes than were written: {others[:3]}")


def _load(backend: Backend, model: torch.nn.Module, found: Mapping[str, torch.Tensor]) -> str:
    """Load as a user does. Where the library refuses its own state, its words are given, and it is loaded as the
    library allows for what is trusted."""
    try:
        model.load_state_dict(found, strict=False)
    except RuntimeError as error:
        with backend.trusting_scaling_state():
            model.load_state_dict(found, strict=False)
        return str(error)
    return ""


def _new_layers(
    backend: Backend, model: torch.nn.Module, found: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """New layers in place of those that have scaling state, by name: as in a process that resumes."""
    for name, module in model.named_modules():
        new = backend.new_layer(module) if _key(name) in found else None
        if new is not None:
            yield name, new


def _key(name: str) -> str:
    """Of a module's scaling state in a state dict."""
    return f"{name}._extra_state"
