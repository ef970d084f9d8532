"""What an arm holds of a training state, by the names of the plain model's parameters: weights, optimizer, schedule.

Tied tensors are listed once. Scaling state that a backend keeps beside its weights is no part of it. Of a backend with
a frozen base only the adapters are.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.questions.checkpoints.evidence import Kept
from pytest_fp8.said import Told
from pytest_fp8.worker.checkpoint.stores import OPTIMIZER, SCALARS, class_name, data_of, is_tensor, leaves
from pytest_fp8.worker.tensors import Sharded, digests, foreign, held, join, parameters, parts, plain_name
from pytest_fp8.worker.training.step import innermost, load_schedule_state, schedule_of, schedule_state

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

EXTRA, BESIDES = "extra/", "besides/"
"""In the tree that is stored beside the weights and the optimizer's state: what modules give as extra state, and what
else the optimizer and its schedule keep."""
LISTED_ELSEWHERE = ("state", "param_groups", "defaults", "scheduler", "optimizer")
"""Attributes of an optimizer that are kept by other means."""
SWITCHES = ("params", "foreach", "fused", "capturable", "differentiable")
"""Entries of a group that choose an implementation and keep nothing; and its parameters."""


class UnreadableWeightError(Told, TypeError):
    """Neither store can write a weight, because a tensor class wraps it."""


class UnstorableStateError(Told, TypeError):
    """An entry of the optimizer's state is of a kind that cannot be stored or compared."""


class StrayParameter(Told, RuntimeError):
    """The optimizer holds parameters that the model does not have."""


# -- weights ----------------------------------------------------------------------------------------------------------


def weights_of(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(weights by plain name, each storage once; second name of a tied weight -> its first)."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    owner: dict[tuple[int, torch.Size], str] = {}
    live = _live(engine)
    for key, found in engine.model.state_dict().items():
        name = plain_name(key)
        parameter = live.get(name)
        # DeepSpeed's state dict has placeholders.
        value = parameter if parameter is not None and held(parameter).is_part else found
        if not isinstance(value, torch.Tensor) or not is_stored(engine, key):
            continue
        parted = held(value).is_part
        if not parted and hasattr(value, "__tensor_flatten__") and not value.data_ptr():
            raise UnreadableWeightError(f"{name!r} is a {type(value).__name__}, which has no storage to write")
        # A rank's shard may be empty, and then has no address.
        identity = (id(live[name]) if parted else value.data_ptr(), value.shape)
        if (value.numel() or parted) and identity in owner:
            aliases[name] = owner[identity]
        else:
            owner[identity] = name
            weights.update(parts(name, held(value).stored(), of=value if parameter is None else parameter))
    return weights, aliases


def is_stored(engine: Engine, key: str) -> bool:
    """Whether users of the backend save this entry of the state dict, and it is no scaling state."""
    return engine.backend.is_checkpointed(key) and not engine.backend.is_scaling_state(key)


def extra_state(engine: Engine) -> tuple[dict[str, Any], list[str]]:
    """(entries of the state dict that are no tensors and data alone, the names of others in words)."""
    entries = engine.model.state_dict().items()
    extra = {plain_name(k): v for k, v in entries if not isinstance(v, torch.Tensor) and is_stored(engine, k)}
    carried = data_of(extra)
    kinds = {name: type(value).__name__ for name, value in extra.items() if name not in carried}
    return carried, [f"{name} (a {kind} that is not data alone)" for name, kind in kinds.items()]


def load_weights(engine: Engine, stored: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
    """Give weights and extra state to the model's ``load_state_dict()``; raises what that raises.

    Not through torch's ``set_model_state_dict()``, which passes ``assign=``: one of the user's own may not know it.
    """
    model, values = engine.model, join(stored, engine.model)
    live, state, absent, taken = _live(engine), {}, [], set()
    for key, now in model.state_dict().items():
        name = plain_name(key)
        source = name if name in values else aliases.get(name, name)
        if source not in values:
            absent.append(isinstance(now, torch.Tensor) and is_stored(engine, key))
        elif isinstance(target := live.get(name, now), torch.Tensor):
            state[key] = held(target).loaded(values[source])
        else:
            state[key] = values[source]
        taken.add(source)
    others = {name: value for name, value in values.items() if name not in taken}
    # As a user loads it, where all is there: a load_state_dict() of one's own may know no strict=False.
    strict = {} if others or not absent or any(absent) else {"strict": False}
    model.load_state_dict(state | others, **strict)


def _live(engine: Engine) -> dict[str, torch.Tensor]:
    return {plain_name(name): each for name, each in engine.model.named_parameters(remove_duplicate=False)}


# -- what an optimizer keeps: state_dict(), attributes, schedule -------------------------------------------------------
#
# Not through torch's get_optimizer_state_dict() and set_optimizer_state_dict(): where the optimizer's state is empty,
# as it is before a load, these make a step to fill it, which an optimizer with a closure cannot and one of the user's
# own may do anything in; and they refuse a state_dict() of another form.


def require_own(engine: Engine) -> None:
    """Raise :class:`StrayParameter` for an optimizer whose state no name of the model's can tell."""
    if others := foreign(engine.model, engine.optimizer):
        every = sum(len(group["params"]) for group in engine.optimizer.param_groups)
        raise StrayParameter(
            f"{len(others)} parameters of the {every} that the optimizer steps are none of the model's: no checkpoint "
            "can name their state"
        )


def optimizer_state(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the optimizer's ``state_dict()`` has of the model's parameters, by ``optimizer/<parameter>/<entry>``; what
    else is data alone: entries of groups, the rest of the state dict, attributes, the schedule's state). A state dict
    of another form than torch's is all rest."""
    optimizer, names, of = innermost(engine.optimizer), _stepped(engine), _live(engine)
    rest = optimizer.state_dict()
    of_torch = {"state", "param_groups"} <= rest.keys()
    state = rest.pop("state") if of_torch else {}
    found: dict[str, Any] = {}
    for live, entries in ((names[index], entries) for index, entries in state.items() if index in names):
        for entry, value in entries.items():
            of_parts = parts(live, value, of=of[live])
            found.update((f"{OPTIMIZER}{name}/{entry}", part) for name, part in of_parts)
    public = {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and k not in LISTED_ELSEWHERE}
    return found, {
        "groups": [data_of({**group, "params": None}) for group in rest.pop("param_groups")] if of_torch else None,
        "rest": data_of(rest),
        "attributes": data_of(public),
        "schedule": data_of(schedule_state(schedule_of(optimizer))),
    }


def load_optimizer(engine: Engine, state: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Give what :func:`optimizer_state` gave to ``load_state_dict()`` of optimizer and schedule; raises what these
    raise."""
    optimizer, live = innermost(engine.optimizer), _live(engine)
    by_entry: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
        by_entry.setdefault(entry, {})[name] = value
    places = {name: index for index, name in _stepped(engine).items()}
    entries: dict[int, dict[str, Any]] = {}
    for entry, values in by_entry.items():
        for name, value in join(values, engine.model).items():
            parameter = live[name]
            alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            shards = Sharded.has(parameter) and alike
            entries.setdefault(places[name], {})[entry] = held(parameter).loaded(value) if shards else value
    if others["groups"] is None:
        given = optimizer.state_dict() | others["rest"]
    else:
        count, pairs = itertools.count(), zip(optimizer.param_groups, others["groups"], strict=True)
        groups = [{**now, **old, "params": [next(count) for _ in now["params"]]} for now, old in pairs]
        given = {"state": entries, "param_groups": groups, **others["rest"]}
    optimizer.load_state_dict(given)
    for name, value in others["attributes"].items():
        now = vars(optimizer).get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
            now.detach().copy_(value)  # others may refer to it
        else:
            setattr(optimizer, name, value)
    schedule = schedule_of(engine.optimizer)
    load_schedule_state(schedule, schedule_state(schedule) | others["schedule"])


def optimizer_digests(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """A digest of each tensor in an optimizer's state, in the dtype of its parameter, to which ``load_state_dict()``
    casts it; numbers and text in words, so that NaN is NaN. Raises :class:`UnstorableStateError` for anything else."""
    live = parameters(engine.model)
    found: dict[str, Any] = {}
    for key, value in state.items():
        name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
        cast = is_tensor(value) and entry != "step" and live[name].is_floating_point()
        found.update(leaves(key, value.to(live[name].dtype) if cast else value))
    for name, leaf in found.items():
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            raise UnstorableStateError(f"{name} is a {class_name(type(leaf))}, which no checkpoint can hold")
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    return {name: repr(leaf) for name, leaf in found.items() if name not in tensors} | digests(tensors)


def _stepped(engine: Engine) -> dict[int, str]:
    """Index of a parameter in the optimizer's ``state_dict()`` -> its live name without prefixes."""
    names = {id(each): name for name, each in _live(engine).items()}
    every = (each for group in innermost(engine.optimizer).param_groups for each in group["params"])
    return {index: names[id(each)] for index, each in enumerate(every) if id(each) in names}


def kept(engine: Engine) -> Kept:
    """What is kept beside weights and the optimizer's state of each parameter: the schedule, the optimizer's groups,
    and its attributes. Of private ones those that are tensors or hold them: others may be caches of anything."""
    model, inner = engine.model, innermost(engine.optimizer)
    of_model = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    groups = {
        f"group {index}: {name}": value
        for index, group in enumerate(inner.param_groups)
        for name, value in group.items()
        if name not in SWITCHES
    }
    attributes = {
        name: value
        for one in (inner, engine.optimizer)
        for name, value in vars(one).items()
        if name not in LISTED_ELSEWHERE and (not name.startswith("_") or isinstance(value, (torch.Tensor, list, tuple)))
    }
    parts = {"schedule": schedule_state(schedule_of(engine.optimizer)), "groups": groups, "attributes": attributes}
    return {part: dict(_entries(values.items(), of_model)) for part, values in parts.items()}


def _entries(values: Iterable[tuple[str, Any]], of_model: Container[int]) -> Iterator[tuple[str, Any]]:
    """(name, number or text of a digest) of all numbers and tensors in these values. What belongs to the model is
    listed with its weights, and of private names only tensors count."""
    for name, leaf in (found for entry, value in values for found in leaves(entry, value)):
        private = any(part.startswith("_") and part != "_schedulers" for part in name.split("."))
        # Scaling state of Transformer Engine, which the other precision does not have.
        if id(leaf) in of_model or name.endswith("_extra_state"):
            continue
        if isinstance(leaf, torch.Tensor):
            one = leaf.numel() == 1 and not leaf.is_complex()
            yield name, leaf.item() if one else f"tensor {'x'.join(map(str, leaf.shape))} {digests({'': leaf})['']:x}"
        elif isinstance(leaf, (bool, int, float)) and not private:
            yield name, leaf
        elif callable(getattr(leaf, "state_dict", None)) and not isinstance(leaf, type):
            yield from _entries([(name, leaf.state_dict())], of_model)
