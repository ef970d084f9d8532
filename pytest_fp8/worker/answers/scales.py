"""Does scaling state come back from FP8 to FP8? Written with torch.distributed.checkpoint, reset, loaded, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.worker.state import checkpoint_stores
from pytest_fp8.worker.state.checkpoint_stores import MODEL, digests
from pytest_fp8.worker.state.fused_params import plain_name
from pytest_fp8.worker.training.ranks import every_rank_s

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

_EXTRA = "_extra_state"


def carry_scales(engine: Engine, folder: str) -> dict[str, Any]:
    """The fields of :class:`pytest_fp8.questions.checkpoints.evidence.Scales`. What was loaded stays: the arm goes on
    with it.

    Every rank writes and reads. Of state that is no shard the store keeps one rank's copy, as a user's does.
    """
    stored = _digests(engine)
    state = {key: value for key, value in engine.model.state_dict().items() if engine.backend.is_scaling_state(key)}
    told: dict[str, Any] = {"stored": stored, "reset": {}, "loaded": {}, "fresh": {}, "refused": "", "failed": ""}
    told["no_place"] = 0
    if not stored or not state:
        return told
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint_stores.write(path, "dcp", state, {}, {})
        read = checkpoint_stores.read(path, "dcp", torch.device("cpu"))
        found = {name.removeprefix(MODEL): value for name, value in read.items()}
        _require_ours(state, found)
        engine.backend.reset_scaling(engine.model)
        told["reset"] = _digests(engine)
        told["refused"] = _load(engine, lambda: engine.model.load_state_dict(found, strict=False))
        told["loaded"] = _digests(engine)
        told["fresh"], told["no_place"] = _into_new_layers(engine, found)
    except Exception as error:  # whatever the library or the store says of its own state is told, and is no arm's error
        told["failed"] = f"{type(error).__name__}: {error}"
    return told


def _digests(engine: Engine) -> dict[str, int]:
    """``<layer> <tensor>`` -> digest of its bits."""
    found = {
        f"{plain_name(name)} {what}": tensor
        for name, module in engine.model.named_modules()
        if engine.backend.is_fp8_layer(module)
        for what, tensor in engine.backend.scaling_tensors(module).items()
    }
    return digests(found)


def _require_ours(state: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Libraries unpickle what they load here: it must be, to the bit, what one of this arm's ranks wrote just now."""
    written = every_rank_s(digests(state))
    others = [key for key, digest in digests(found).items() if digest not in [mine.get(key) for mine in written]]
    if others:
        raise ValueError(f"the store holds other bytes than were written: {others[:3]}")


def _load(engine: Engine, load: Callable[[], object]) -> str:
    """Load as a user does. Where the library refuses its own state, its words are given, and it is loaded as the
    library allows for what is trusted."""
    try:
        load()
    except RuntimeError as error:
        with engine.backend.trusting_scaling_state():
            load()
        return str(error)
    return ""


def _into_new_layers(engine: Engine, found: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
    """Digests of what new layers hold that were given this state before their first step, as in a process that resumes;
    and how many of them had no place of that size for it."""
    tensors: dict[str, torch.Tensor] = {}
    without_place = 0
    for name, module in engine.model.named_modules():
        key = f"{name}.{_EXTRA}"
        fresh = engine.backend.new_layer(module) if key in found else None
        if fresh is None:
            continue
        without_place += fresh.get_extra_state().numel() != found[key].numel()
        with engine.backend.trusting_scaling_state():
            fresh.set_extra_state(found[key])
        tensors |= {f"{plain_name(name)} {what}": t for what, t in engine.backend.scaling_tensors(fresh).items()}
    return digests(tensors), without_place
