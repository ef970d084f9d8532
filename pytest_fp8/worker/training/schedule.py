"""The learning-rate schedule of an optimizer and the settings of its groups: stepped as a loop does, and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from pytest_fp8.worker.training.phases import innermost


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule that a workload's ``optimizer()`` set as ``optimizer.scheduler``, or ``None``."""
    return getattr(innermost(optimizer), "scheduler", None)


def step_schedule(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Step the schedule, where there is one, as a training loop does: once, and with the loss where it goes by that."""
    schedule = schedule_of(optimizer)
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss)
    elif schedule is not None:
        schedule.step()


def settings_now(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """What puts the schedule at ``optimizer.scheduler`` and the groups back to what they are now. A group that was
    added since is taken out: a step that unfreezes layers adds it again."""
    optimizer, schedule = innermost(optimizer), schedule_of(optimizer)
    settings = [copy.deepcopy(dict(group, params=None)) for group in optimizer.param_groups]
    before = schedule_state(schedule)

    def put_back() -> None:
        load_schedule_state(schedule, before)
        del optimizer.param_groups[len(settings) :]
        for group, old in zip(optimizer.param_groups, settings, strict=False):
            for key in old.keys() - {"params"}:
                # Compiled code holds a rate that is a tensor.
                if isinstance(old[key], torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(old[key])
                else:
                    group[key] = copy.deepcopy(old[key])

    return put_back


def schedule_state(schedule: Any) -> dict[str, Any]:
    """A copy of what a schedule keeps. One of the user's own may have no ``state_dict()``: then its attributes that are
    numbers, text, or lists and dicts of these. Others are its optimizer and the optimizer's groups."""
    if hasattr(schedule, "state_dict"):
        return copy.deepcopy(schedule.state_dict())
    held = vars(schedule) if hasattr(schedule, "__dict__") else {}
    return {key: copy.deepcopy(value) for key, value in held.items() if _is_data(value)}


def load_schedule_state(schedule: Any, state: dict[str, Any]) -> None:
    """Put what :func:`schedule_state` gave into the schedule."""
    if hasattr(schedule, "load_state_dict"):
        schedule.load_state_dict(copy.deepcopy(state))
    elif state:
        vars(schedule).update(copy.deepcopy(state))


def _is_data(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return all(part is None or isinstance(part, (int, float, str)) for part in parts)
