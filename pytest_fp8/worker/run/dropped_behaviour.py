"""What a Linear does besides its product (a forward of its own, a hook), and whether a conversion kept it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pytest_fp8.backends.base import ALIGNMENT
from pytest_fp8.backends.linears import linears
from pytest_fp8.worker.state.snapshot import generators_kept

# Private: torch has no public list of a module's hooks.
_HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def with_behaviour(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linears of an unconverted model that do more than multiply, by name."""
    return {name: linear for name, linear in linears(model).items() if _dropped(linear, None)}


def dropped_behaviour(
    before: Mapping[str, torch.nn.Linear], model: torch.nn.Module, converted: Iterable[str]
) -> dict[str, str]:
    """Converted layer -> what it did before the conversion and no longer does. A layer that was converted in place, or
    into a class derived from its own, still does it."""
    modules = dict(model.named_modules())
    gone = {name: _dropped(before[name], modules.get(name)) for name in converted if name in before}
    return {name: " and ".join(what) for name, what in gone.items() if what}


def _dropped(was: torch.nn.Linear, now: torch.nn.Module | None) -> list[str]:
    """What ``was`` does besides its product and ``now`` does not; with ``None``, all of it."""
    if was is now:
        return []
    kind = type(was)
    what = [said for hooks, said in _HOOKS.items() if getattr(was, hooks) and not getattr(now, hooks, None)]
    if kind.forward is not torch.nn.Linear.forward and not isinstance(now, kind) and not _multiplies_alone(was):
        what.append(f"the forward of {kind.__qualname__}")
    if "forward" in vars(was) and (now is None or "forward" not in vars(now)):
        what.append("a forward of its own")
    return what


def _multiplies_alone(linear: torch.nn.Linear) -> bool:
    """Whether its class's own forward computes what ``nn.Linear``'s does, by the same nodes of autograd, and leaves
    nothing behind in the layer. One that casts a weight to its input's type does."""
    held = dict(vars(linear))
    rows = torch.randn(ALIGNMENT, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight)
    try:
        with torch.enable_grad(), generators_kept():
            rows.requires_grad_()
            made, wanted = type(linear).forward(linear, rows), torch.nn.Linear.forward(linear, rows)
        alike = torch.equal(made, wanted) and _nodes(made.grad_fn) == _nodes(wanted.grad_fn)
    except Exception:
        return False  # It takes more than a tensor of rows, or gives more.
    kept = vars(linear).keys() == held.keys() and all(vars(linear)[key] is value for key, value in held.items())
    vars(linear).clear()
    vars(linear).update(held)
    return alike and kept


def _nodes(node: Any) -> list[str]:
    """The names of a node of autograd and of all that it goes on to."""
    return [] if node is None else [node.name(), *(name for each, _ in node.next_functions for name in _nodes(each))]
