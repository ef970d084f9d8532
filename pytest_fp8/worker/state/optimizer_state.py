"""An optimizer's state by the plain model's parameter names, taken from and put into a live arm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.said import Told
from pytest_fp8.worker.state import optimizer_extras
from pytest_fp8.worker.state.checkpoint_stores import OPTIMIZER
from pytest_fp8.worker.state.fused_params import join, plain_name, split
from pytest_fp8.worker.training.phases import innermost
from pytest_fp8.worker.training.zero import ZeroOptimizer


class StrayParameter(Told, RuntimeError):
    """The optimizer holds parameters that the model does not have."""


def foreign(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The parameters that the optimizer steps and the model does not have: master copies, or another model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]


def require_own(model: torch.nn.Module, optimizer: Any) -> None:
    """Raise :class:`StrayParameter` for an optimizer whose state no name of the model's can tell."""
    if others := foreign(model, optimizer):
        every = sum(len(group["params"]) for group in optimizer.param_groups)
        raise StrayParameter(
            f"{len(others)} parameters of the {every} that the optimizer steps are none of the model's: no checkpoint "
            "can name their state"
        )


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, fused: FusedParams) -> dict[str, Any]:
    """What the optimizer keeps of the model's parameters, by ``optimizer/<parameter>/<entry>``, in their order.

    ``fused``: by plain names of the live parameters.
    """
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    entries: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                continue
            live = names[id(parameter)]
            if isinstance(optimizer, ZeroOptimizer):
                kept = optimizer.entries(parameter)
            else:
                kept = optimizer.state.get(parameter, {})
            for entry, value in kept.items():
                if optimizer_extras.is_tensor(value):
                    parts = list(split([(live, value)], fused))
                else:
                    parts = optimizer_extras.for_each_part(live, entry, value, fused)
                entries.update((f"{OPTIMIZER}{name}/{entry}", part) for name, part in parts)
    return entries


def load_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    fused: FusedParams,
    tensors: Mapping[str, torch.Tensor],
    extras: Mapping[str, Any],
    besides: Mapping[str, Any],
) -> list[str]:
    """Give what :func:`state_of` gave, and the groups in ``besides``, to the optimizer's own ``load_state_dict()``.

    Gives what was left out, in words. Raises what that raises, and ``KeyError`` for a parameter that the model lacks.
    """
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    by_entry: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        # A count of steps stays on the host, where torch keeps it.
        by_entry.setdefault(entry, {})[name] = value if value.dim() else value.cpu()
    held: dict[int, dict[str, Any]] = {}
    whole = {part: live for live, parts in fused.items() for part, _ in parts}
    found = [(name, entry, value) for entry, values in by_entry.items() for name, value in join(values, fused).items()]
    for key, value in extras.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        found.append((whole.get(name, name), entry, value))
    for name, entry, value in found:
        if name not in parameters:
            raise KeyError(f"the stored optimizer has a parameter {name!r} that this model does not have")
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.fill(parameters[name], entry, value)
        else:
            held.setdefault(id(parameters[name]), {})[entry] = value
    groups, more = besides["groups"], besides["more"]
    if isinstance(optimizer, ZeroOptimizer):
        for group, entries in zip(optimizer.param_groups, groups, strict=True):
            group.update(entries)
        return []
    inner = innermost(optimizer)
    order = [parameter for group in inner.param_groups for parameter in group["params"]]
    state, load, left_out = inner.state_dict() | more, inner.load_state_dict, []
    if not {"state", "param_groups"} <= state.keys():
        # Its form is its own, and by no names of parameters.
        state, load = torch.optim.Optimizer.state_dict(inner), partial(torch.optim.Optimizer.load_state_dict, inner)
        left_out = [f"load_state_dict() of {type(inner).__name__}, whose state_dict() has a form of its own"]
    state["state"] = {index: held[id(each)] for index, each in enumerate(order) if id(each) in held}
    state["param_groups"] = [{**a, **b} for a, b in zip(state["param_groups"], groups, strict=True)]
    load(state)
    return left_out
