"""Saves and loads an arm's training state through a store: weights by plain names, optimizer, schedule.

Tied tensors are stored once. Scaling state that a backend keeps beside its weights is left out on purpose and listed.
A backend with a frozen base stores its adapters only, and the number of the others is reported. What is no tensor is
carried where it is data alone, and else listed. Nothing else is left out: a stored key that the arm has no weight for
is reported. What is loaded goes through ``load_state_dict()`` of the model and of the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from pytest_fp8.backends.base import FusedParams
from pytest_fp8.questions.checkpoints.evidence import Loaded, Saved
from pytest_fp8.said import Told
from pytest_fp8.worker.checkpoint import stores
from pytest_fp8.worker.checkpoint.stores import (
    OPTIMIZER,
    SCALARS,
    UnstorableStateError,
    class_name,
    data_of,
    is_tensor,
    leaves,
)
from pytest_fp8.worker.notes import untied
from pytest_fp8.worker.record.probe import StaleCopies
from pytest_fp8.worker.tensors import (
    assign,
    change,
    digests,
    foreign,
    is_part,
    is_partitioned,
    join,
    placed,
    plain_name,
    plain_shards,
    shape,
    split,
)
from pytest_fp8.worker.training.ranks import wait_for_all
from pytest_fp8.worker.training.step import innermost, load_schedule_state, schedule_of, schedule_state

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine

EXTRA, BESIDES = "extra/", "besides/"
"""In the tree that is stored beside the weights and the optimizer's state: what modules give as extra state, and
:func:`besides`."""


LISTED_ELSEWHERE = ("state", "param_groups", "defaults", "scheduler", "optimizer")
"""Attributes of an optimizer that are kept by other means."""


class UnreadableWeightError(Told, TypeError):
    """Neither store can write a weight, because a tensor class wraps it."""


def save(engine: Engine, folder: Path, store: str, optimizer: bool) -> Saved:
    """Write the arm's state to ``folder``."""
    if optimizer:
        require_own(engine.model, engine.optimizer)
    weights, _, scaling = weights_of(engine)
    state = optimizer_state(engine) if optimizer else {}
    saved = record(engine, weights, scaling, state)
    extra = _extra_state(engine)
    carried = data_of(extra)
    tree: dict[str, Any] = {**state, EXTRA: carried}
    if optimizer:
        tree[BESIDES] = besides(engine.optimizer)
    try:
        stores.write(folder, store, weights, tree)
    except Exception as error:
        held = sum(each.nbytes for each in tree_leaves([weights, tree]) if isinstance(each, torch.Tensor))
        # A full disk's message says how much room there must be.
        vars(error)["fp8_checkpoint"] = str(folder), held
        raise
    engine.synchronize()
    wait_for_all()
    return replace(
        on_disk(saved, folder, store, weights),
        untied=untied(*engine.weights),
        left_out=[
            f"{name} (a {type(value).__name__} that is not data alone)"
            for name, value in extra.items()
            if name not in carried
        ],
        frozen=sum(not engine.backend.is_checkpointed(key) for key in engine.model.state_dict()),
    )


def record(engine: Engine, weights: Mapping[str, torch.Tensor], scaling: list[str], state: Mapping[str, Any]) -> Saved:
    """What the arm holds, of which nothing is written yet."""
    return Saved(
        keys=sorted(weights),
        scaling_state=scaling,
        digests=digests(weights),
        optimizer_digests=_digests_of(state),
        narrowed=_narrowed(engine, state),
    )


def on_disk(saved: Saved, folder: Path, store: str, weights: Container[str] | None = None) -> Saved:
    """The record with what the files say of these weights, or of all tensors: an optimizer's state may be in FP8."""
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = stores.dtypes_on_disk(folder, store).items()
    counts = Counter(dtype for name, dtype in found if weights is None or name in weights)
    return replace(saved, on_disk=counts, bytes=size)


def load(engine: Engine, folder: Path, store: str, optimizer: bool) -> Loaded:
    """Read ``folder`` into the arm. Loads nothing where a weight is missing or unexpected, so that no half-loaded model
    trains on."""
    weights, aliases, _ = weights_of(engine)
    stored, tree = stores.read(folder, store, engine.device, weights)
    extra, others = tree.pop(EXTRA), tree.pop(BESIDES, None)
    found = {plain_name(name): value for name, value in stored.items()}
    # Stored as a weight of its own, which is tied here: a tied one is stored once.
    doubled = {name: aliases[name] for name in sorted(set(found) & set(aliases))}
    report = Loaded(
        missing=sorted(set(weights) - set(found)),
        unexpected=sorted(set(found) - set(weights) - set(aliases)),
        wrong_shape=sorted(n for n in set(weights) & set(found) if shape(weights[n]) != found[n].shape),
        untied=untied(*engine.weights) | doubled,
        loaded=False,
    )
    if report.missing or report.unexpected or report.wrong_shape or doubled:
        return report
    watch = StaleCopies(engine)
    with torch.no_grad():
        # Both arms may have trained from one seed: what a load leaves out must not be right by accident.
        for each in {id(p): p for n, p in engine.model.named_parameters() if plain_name(n) in weights}.values():
            change(each, torch.neg)
    before = digests(weights)
    watch.before()
    left_out: list[str] = []
    try:
        left_out = _fill(engine, found, aliases, extra)
        # Free the copies before anything is computed: at 8B they are 15 GiB.
        found.clear()
        stored.clear()
        if optimizer:
            engine.optimizer.state.clear()
            with _asked(innermost(engine.optimizer)):
                load_optimizer(engine, tree, others)
    except _Refused as refused:
        engine.park()
        return replace(report, refused=str(refused))
    return replace(arrived(engine, optimizer, watch, before), untied=report.untied, left_out=left_out)


def arrived(engine: Engine, optimizer: bool, watch: StaleCopies, before: Mapping[str, int]) -> Loaded:
    """What the arm holds after a load, and whether it computes with it. Scales are made anew. ``before``: digests of
    the weights that it held before the load."""
    weights, _, _ = weights_of(engine)
    state = optimizer_state(engine) if optimizer else {}
    now = digests(weights)
    loaded = Loaded(
        loaded=True,
        digests=now,
        optimizer_digests=_digests_of(state),
        untouched=sorted(name for name, digest in now.items() if before.get(name) == digest),
    )
    loaded = replace(loaded, stale=watch.stale(), unchecked=watch.unchecked)
    engine.renew_scales()
    engine.park()
    return loaded


class _Refused(Exception):
    """What a ``load_state_dict()`` raised."""


@contextmanager
def _asked(whose: object) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        kind = type(whose)
        raise _Refused(
            f"load_state_dict() of {kind.__qualname__}: {type(error).__name__}: {str(error)[:600]}"
        ) from error


def _fill(
    engine: Engine, found: Mapping[str, torch.Tensor], aliases: Mapping[str, str], extra: Mapping[str, Any]
) -> list[str]:
    """Give the weights, and the extra state, to the model's ``load_state_dict()``; gives what has no place there.

    Not through torch's ``set_model_state_dict()``, which passes ``assign=``: one of the user's own may not know it.
    """
    model = engine.model
    values = join(found, plain_fused(engine))
    parted = {plain_name(n): p for n, p in model.named_parameters(remove_duplicate=False) if is_partitioned(p)}
    for name, parameter in parted.items():
        assign(parameter, values[aliases.get(name, name)])
    entries = model.state_dict()
    state: dict[str, Any] = {}
    for key, value in entries.items():
        name = plain_name(key)
        stored = values.get(aliases.get(name, name))
        if stored is not None and name not in parted and isinstance(value, torch.Tensor):
            state[key] = placed(stored, value)
        elif name in extra:
            state[key] = extra[name]
    with _asked(model):
        # As a user loads it, where all is there: a load_state_dict() of one's own may know no strict=False.
        model.load_state_dict(state, **({} if state.keys() == entries.keys() else {"strict": False}))
    taken = {plain_name(key) for key in state}
    return [f"{name} (no module takes it)" for name in sorted(extra) if name not in taken]


def _extra_state(engine: Engine) -> dict[str, Any]:
    """Entries of the state dict that are no tensors, without a library's scaling state."""
    backend = engine.backend
    return {
        plain_name(key): value
        for key, value in engine.model.state_dict().items()
        if not isinstance(value, torch.Tensor) and backend.is_checkpointed(key) and not backend.is_scaling_state(key)
    }


def weights_of(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, str], list[str]]:
    """(weights to store by plain name, each storage once; second name of a tied weight -> its first; scaling state)."""
    weights: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    scaling: list[str] = []
    owner: dict[tuple[int, torch.Size], str] = {}
    fused = plain_fused(engine)
    live = {plain_name(name): each for name, each in engine.model.named_parameters(remove_duplicate=False)}
    for key, found in engine.model.state_dict().items():
        name = plain_name(key)
        value = live[name] if is_partitioned(live.get(name)) else found
        if not engine.backend.is_checkpointed(key):
            continue
        if engine.backend.is_scaling_state(key):
            scaling.append(name)
            continue
        if not isinstance(value, torch.Tensor):
            continue  # _extra_state() has it
        if name in weights or name in aliases:
            raise ValueError(f"two state-dict keys have the same name {name!r} once wrapper prefixes are removed")
        parted = is_part(value)
        if not parted and hasattr(value, "__tensor_flatten__") and not value.data_ptr():
            raise UnreadableWeightError(f"{name!r} is a {type(value).__name__}, which has no storage to write")
        # A rank's shard may be empty, and then has no address.
        identity = (id(live[name]) if parted else value.data_ptr(), value.shape)
        if (value.numel() or parted) and identity in owner:
            aliases[name] = owner[identity]
            continue
        owner[identity] = name
        weights.update(split([(name, plain_shards(value))], fused))
    return weights, aliases, scaling


def _digests_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A digest of each tensor in an optimizer's state; numbers and text in words, so that NaN is NaN. Raises
    :class:`UnstorableStateError` where there is anything else."""
    found = dict(leaf for name, value in state.items() for leaf in leaves(name, value))
    for name, leaf in found.items():
        if not isinstance(leaf, (torch.Tensor, *SCALARS)):
            raise UnstorableStateError(f"{name} is a {class_name(type(leaf))}, which no checkpoint can hold")
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, torch.Tensor)}
    return {name: repr(leaf) for name, leaf in found.items() if name not in tensors} | digests(tensors)


def _narrowed(engine: Engine, state: Mapping[str, Any]) -> dict[str, int]:
    """``Optimizer.load_state_dict`` casts state to the dtype of its parameter: digests of what arrives then."""
    dtypes = {plain_name(name): parameter.dtype for name, parameter in engine.model.named_parameters()}
    found = {}
    for key, value in state.items():
        name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
        dtype = dtypes.get(name)
        cast = dtype is not None and dtype.is_floating_point and entry != "step" and is_tensor(value)
        if cast and value.dtype != dtype:
            found[key] = value.to(dtype)
    return digests(found)


# -- what an optimizer keeps, by the plain model's parameter names: state_dict(), attributes, schedule ----------------
#
# Not through torch's get_optimizer_state_dict() and set_optimizer_state_dict(): where the optimizer's state is empty,
# as it is before a load, these make a step to fill it, which an optimizer with a closure cannot and one of the user's
# own may do anything in; and they refuse a state_dict() of another form.


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


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """What the optimizer keeps of the model's parameters, by ``optimizer/<parameter>/<entry>``, in their order."""
    optimizer, fused = innermost(engine.optimizer), plain_fused(engine)
    names = {id(parameter): plain_name(name) for name, parameter in engine.model.named_parameters()}
    found: dict[str, Any] = {}
    for parameter in _stepped(optimizer):
        live = names.get(id(parameter), "")
        # ZeRO-3's optimizer gathers what it keeps in parts.
        kept = getattr(optimizer, "entries", optimizer.state.get)(parameter)
        for entry, value in (kept or {}).items() if live else ():
            if is_tensor(value):
                parts = list(split([(live, value)], fused))
            else:
                parts = [(name, value) for name, _ in fused.get(live, ((live, None),))]
            found.update((f"{OPTIMIZER}{name}/{entry}", part) for name, part in parts)
    return found


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


def load_optimizer(engine: Engine, state: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Give what :func:`optimizer_state` and :func:`besides` gave to ``load_state_dict()`` of optimizer and schedule.

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
        held_now = vars(optimizer).get(name)
        if isinstance(held_now, torch.Tensor) and isinstance(value, torch.Tensor) and held_now.shape == value.shape:
            held_now.detach().copy_(value)  # others may refer to it
        else:
            setattr(optimizer, name, value)
    schedule = schedule_of(engine.optimizer)
    load_schedule_state(schedule, schedule_state(schedule) | others["schedule"])


def _is_of_torch(state: Mapping[str, Any]) -> bool:
    """Whether a ``state_dict()`` has the form that torch gives it. One of the user's own travels as it is."""
    return {"state", "param_groups"} <= state.keys()


def _stepped(optimizer: Any) -> list[torch.Tensor]:
    """In the order by which its ``state_dict()`` counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
