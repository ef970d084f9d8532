"""A model's Linears: which are converted and which are skipped with what reason, how one is replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from pytest_fp8.backends.base import ALIGNMENT, Conversion
from pytest_fp8.recipes import HEADS, Reason, Stays
from pytest_fp8.said import Told

if TYPE_CHECKING:
    import torch

SKIPPED = "_fp8_skipped"
"""The attribute of a Linear that is to stay in high precision; it holds the :class:`Reason`."""

OF_PEFT = r"\.(original_module|modules_to_save\.[^.]+)$"
"""What peft puts behind the name of a layer of which it trains a copy (``modules_to_save``)."""


class RenamedError(Told, LookupError):
    """The model that ``convert()`` gave has no modules of some of its Linears' names."""


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Every ``nn.Linear`` by name, in registration order; one that hangs in several places has its first name."""
    import torch

    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def other_names(model: torch.nn.Module) -> dict[str, str]:
    """Each further name of a Linear that hangs in several places -> its first one."""
    first = {module: name for name, module in linears(model).items()}
    every = model.named_modules(remove_duplicate=False)
    return {name: first[m] for name, m in every if m in first and first[m] != name}


def weight_of(module: torch.nn.Module) -> Any:
    """Its parameter ``weight``, or ``None``. One that a parametrization computes is none."""
    return dict(module.named_parameters(recurse=False)).get("weight")


def put_in_place(model: torch.nn.Module, new: Mapping[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    """Replace each module among the keys of ``new`` in all places where it hangs: blocks may share one.

    Gives the model; it is another object where the model itself is among the keys.
    """
    every = [(name.rpartition("."), module) for name, module in model.named_modules(remove_duplicate=False) if name]
    places = [(model.get_submodule(to), child, new[module]) for (to, _, child), module in every if module in new]
    for parent, child, module in places:
        setattr(parent, child, module)
    return new.get(model, model)


# -- what a conversion takes and what it skips ------------------------------------------------------------------------


def plan(model: torch.nn.Module, heads: bool = False) -> Conversion:
    """What a conversion of this model is meant to do. A Linear stays in high precision by its mark, its name or its
    sizes; with ``heads`` output projections are converted like any other."""
    result = Conversion()
    for name, module in linears(model).items():
        reason: Reason | None = getattr(module, SKIPPED, None)
        reason = reason or reason_to_skip(name, module.in_features, module.out_features)
        if heads and reason is not None and reason.kind is Stays.HEAD:
            reason = odd_size(module.in_features, module.out_features)
        if reason:
            result.skipped[name] = reason
        else:
            result.converted.append(name)
    return result


def observed_conversion(
    model: torch.nn.Module,
    originals: Mapping[str, tuple[int, int]],
    is_fp8: Callable[[torch.nn.Module], bool],
    leave: Sequence[str] = (),
) -> Conversion:
    """What a conversion by the user or the library did, read from the live model.

    ``originals``: name -> (in_features, out_features) of the Linears before. A Linear that is no FP8 layer and has no
    reason to be skipped is in neither list: only the user can say whether it was left out on purpose. Raises
    :class:`RenamedError` where a Linear's name is gone.
    """
    result = Conversion()
    modules = dict(model.named_modules())
    gone = [name for name in originals if name not in modules]
    if gone:
        names = ", ".join(gone[:4]) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
        raise RenamedError(f"convert() must keep the names of the model's Linears; gone: {names}")
    for name, sizes in originals.items():
        left = skipped_by_name(name, leave)
        reason = reason_to_skip(name, *sizes) or left
        fp8 = is_fp8(modules[name])
        if fp8:
            result.converted.append(name)
        if reason and (not fp8 or left):
            # A Linear that the workload leaves and that was converted is in both lists: the layers question reports it.
            result.skipped[name] = reason
    return result


def skipped_by_name(name: str, patterns: Sequence[str]) -> Reason | None:
    """The reason where one of the workload's ``leave`` patterns matches the Linear's name."""
    pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
    return Reason(Stays.LEFT, f"the workload leaves {pattern!r}") if pattern is not None else None


def mark_skipped(model: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Mark the Linears that a pattern matches, so that every conversion skips them with that reason. Gives the patterns
    that match none."""
    found = linears(model)
    for name, linear in found.items():
        reason = skipped_by_name(name, patterns)
        if reason:
            setattr(linear, SKIPPED, reason)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]


def reason_to_skip(name: str, in_features: int, out_features: int) -> Reason | None:
    """The reason that name and sizes give."""
    last = re.sub(OF_PEFT, "", name).rsplit(".", 1)[-1]
    if last in HEADS:
        return Reason(Stays.HEAD, "output projections stay in high precision")
    if any(part.startswith("lora_") for part in name.split(".")):
        return Reason(Stays.ADAPTER, "LoRA matrices stay in high precision")
    return odd_size(in_features, out_features)


def odd_size(in_features: int, out_features: int) -> Reason | None:
    """The reason that the sizes alone give."""
    for side, size in (("in_features", in_features), ("out_features", out_features)):
        if size % ALIGNMENT:
            return Reason(Stays.SIZE, f"{side}={size} is not a multiple of {ALIGNMENT}")
    return None


def stacked_weights(model: torch.nn.Module) -> dict[str, list[int]]:
    """Parameters that hold the weights of several products (experts in transformers): name -> shape.

    They are no Linears, so no conversion of Linears reaches them. torch's own modules (Conv1d) are left out.
    """
    return {
        f"{owner}.{name}" if owner else name: list(parameter.shape)
        for owner, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.")
        for name, parameter in module.named_parameters(recurse=False)
        # A position embedding is [1, positions, width].
        if parameter.dim() == 3 and min(parameter.shape) > 1
    }
