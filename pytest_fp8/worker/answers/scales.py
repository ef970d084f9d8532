"""Does scaling state come back from FP8 to FP8? Written with torch.distributed.checkpoint, reset, loaded, compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state import checkpoint_stores
from pytest_fp8.worker.state.checkpoint_stores import MODEL, digests
from pytest_fp8.worker.state.fused_params import plain_name
from pytest_fp8.worker.training.ranks import every_rank_s

if TYPE_CHECKING:
    from pytest_fp8.backends.base import Backend
    from pytest_fp8.worker.run.engine import Engine


def carry_scales(engine: Engine, folder: str) -> dict[str, Any]:
    """The fields of :class:`pytest_fp8.questions.checkpoints.evidence.Scales`. What was loaded stays: the arm goes on
    with it.

    Every rank writes and reads. Of state that is no shard the store keeps one rank's copy, as a user's does.
    """
    backend, model = engine.backend, engine.model
    stored = _digests(backend, model.named_modules())
    state = {key: value for key, value in model.state_dict().items() if backend.is_scaling_state(key)}
    nothing: dict[str, Any] = {name: {} for name in ("reset", "loaded", "fresh")}
    told = {"stored": stored, **nothing, "no_place": 0, "refused": "", "failed": ""}
    if not stored or not state:
        return told
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint_stores.write(path, "dcp", state, {}, {})
        read = checkpoint_stores.read(path, "dcp", torch.device("cpu"))
        found = {name.removeprefix(MODEL): value for name, value in read.items()}
        _require_ours(state, found)
        backend.reset_scaling(model)
        told["reset"] = _digests(backend, model.named_modules())
        told["refused"] = _load(backend, model, found)
        told["loaded"] = _digests(backend, model.named_modules())
        fresh = dict(_new_layers(backend, model, found))
        told["no_place"] = sum(
            new.get_extra_state().numel() != found[_key(name)].numel() for name, new in fresh.items()
        )
        with backend.trusting_scaling_state():
            for name, new in fresh.items():
                new.set_extra_state(found[_key(name)])
        told["fresh"] = _digests(backend, fresh.items())
    except Exception as error:  # whatever the library or the store says of its own state is told, and is no arm's error
        told["failed"] = f"{type(error).__name__}: {error}"
    return told


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
