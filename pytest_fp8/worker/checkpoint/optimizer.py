"""What an optimizer keeps, by the plain model's parameter names: its ``state_dict()``, its attributes, its schedule.

Not through torch's ``get_optimizer_state_dict()`` and ``set_optimizer_state_dict()``: where the optimizer's state is
empty, as it is before a load, these make a step to fill it, which an optimizer with a closure cannot and one of the
user's own may do anything in; and they refuse a ``state_dict()`` of another form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.said import Told
from pytest_fp8.worker.checkpoint.stores import (
    OPTIMIZER,
    SCALARS,
    UnstorableStateError,
    class_name,
    data_of,
    is_tensor,
    packed,
)
from pytest_fp8.worker.tensors import foreign, join, placed, plain_name, split
from pytest_fp8.worker.training.step import innermost, load_schedule_state, schedule_of, schedule_state
from pytest_fp8.worker.training.zero import ZeroOptimizer

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

LISTED_ELSEWHERE = ("state", "param_groups", "defaults", "scheduler", "optimizer")
"""Attributes of an optimizer that are kept by other means."""


class StrayParameter(Told, RuntimeError):
    """The optimizer holds parameters that the model does not have."""


def require_own(model: torch.nn.Module, optimizer: Any) -> None:
    """Raise :class:`StrayParameter` for an optimizer whose state no name of the model's can tell."""
    if others := foreign(model, optimizer):
        every = sum(len(group["params"]) for group in optimizer.param_groups)
        raise StrayParameter(
            f"{len(others)} parameters of the {every} that the optimizer steps are none of the model's: no checkpoint "
            "can name their state"
        )


def plain_fused(engine: Engine) -> FusedParams:
    """The fused parameters by plain names: without the prefixes that wrappers add."""
    return {plain_name(name): parts for name, parts in engine.fused_params.items()}


def state_of(engine: Engine) -> dict[str, Any]:
    """What the optimizer keeps of the model's parameters, by ``optimizer/<parameter>/<entry>``, in their order."""
    optimizer, fused = innermost(engine.optimizer), plain_fused(engine)
    names = {id(parameter): plain_name(name) for name, parameter in engine.model.named_parameters()}
    found: dict[str, Any] = {}
    for parameter in _stepped(optimizer):
        live = names.get(id(parameter), "")
        kept = optimizer.entries(parameter) if isinstance(optimizer, ZeroOptimizer) else optimizer.state.get(parameter)
        for entry, value in (kept or {}).items() if live else ():
            if is_tensor(value):
                parts = list(split([(live, value)], fused))
            elif live in fused and any(isinstance(leaf, torch.Tensor) for leaf in leaves_of({live: value}).values()):
                raise UnstorableStateError(
                    f"{live}/{entry} is a {type(value).__name__} of tensors, and the weight is that of several layers"
                )
            else:
                parts = [(name, value) for name, _ in fused.get(live, ((live, None),))]
            found.update((f"{OPTIMIZER}{name}/{entry}", part) for name, part in parts)
    return found


def leaves_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors, numbers and text by names. Raises :class:`UnstorableStateError` where there is anything else."""
    leaves: dict[str, Any] = {}
    packed("", entries, leaves)
    for key, leaf in leaves.items():
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            raise UnstorableStateError(f"{key} is a {class_name(type(leaf))}, which no checkpoint can hold")
    return leaves


def besides(optimizer: Any) -> dict[str, Any]:
    """What else is data alone: entries of groups, what the optimizer's state dict has beside states and groups,
    attributes; and the schedule's state."""
    inner = innermost(optimizer)
    public = {name: value for name, value in vars(inner).items() if not name.startswith("_")}
    held = inner.state_dict()
    named = ("state", "param_groups") if _is_of_torch(held) else ()
    return {
        "groups": [data_of({**group, "params": None}) for group in inner.param_groups],
        "more": data_of({key: value for key, value in held.items() if key not in named}),
        "attributes": data_of({k: v for k, v in public.items() if k not in LISTED_ELSEWHERE}),
        "schedule": data_of(schedule_state(schedule_of(optimizer))),
    }


def load(engine: Engine, state: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Give what :func:`state_of` and :func:`besides` gave to the ``load_state_dict()`` of optimizer and schedule.

    Raises what that raises, and ``KeyError`` for a parameter that the model lacks.
    """
    optimizer, fused = innermost(engine.optimizer), plain_fused(engine)
    by_entry: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        by_entry.setdefault(entry, {})[name] = value
    names = {id(parameter): plain_name(name) for name, parameter in engine.model.named_parameters()}
    stepped = _stepped(optimizer)
    places = {names[id(each)]: index for index, each in enumerate(stepped) if id(each) in names}
    held: dict[int, dict[str, Any]] = {}
    for entry, values in by_entry.items():
        for name, value in join(values, fused).items():
            if name not in names.values():
                raise KeyError(f"the stored optimizer has a parameter {name!r} that this model does not have")
            if name in places:
                like = stepped[places[name]]
                is_like_it = isinstance(value, torch.Tensor) and value.shape == like.shape
                held.setdefault(places[name], {})[entry] = placed(value, like) if is_like_it else value
    given = optimizer.state_dict()
    if _is_of_torch(given):
        pairs = zip(given["param_groups"], others["groups"], strict=True)
        given |= {"state": held, "param_groups": [{**live, **group, "params": live["params"]} for live, group in pairs]}
    optimizer.load_state_dict(given | others["more"])
    for name, value in others["attributes"].items():
        setattr(optimizer, name, _into(vars(optimizer).get(name), value))
    schedule = schedule_of(engine.optimizer)
    load_schedule_state(schedule, schedule_state(schedule) | others["schedule"])


def _is_of_torch(state: Mapping[str, Any]) -> bool:
    """Whether a ``state_dict()`` has the form that torch gives it. One of the user's own travels as it is."""
    return {"state", "param_groups"} <= state.keys()


def _stepped(optimizer: Any) -> list[torch.Tensor]:
    """In the order by which its ``state_dict()`` counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _into(target: Any, value: Any) -> Any:
    """``value``, in the tensors of ``target`` where it has them in the same shapes: others may refer to them."""
    if isinstance(value, torch.Tensor):
        if not isinstance(target, torch.Tensor):
            return value
        if target.shape != value.shape:
            return value.to(target.device)
        with torch.no_grad():
            return target.copy_(value)
    if isinstance(value, list) and isinstance(target, list) and len(target) == len(value):
        target[:] = [_into(old, new) for old, new in zip(target, value, strict=True)]
        return target
    if isinstance(value, dict) and isinstance(target, dict):
        target.update({key: _into(target.get(key), new) for key, new in value.items()})
        return target
    return value
