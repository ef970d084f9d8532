"""Saves and loads an arm's training state, through a store of ours or the user's own ``save()`` and ``load()``.

Around either the same is asked: what the arm holds before and after, and whether it computes with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pytest_fp8.case import OWN_STORE
from pytest_fp8.questions.checkpoints.evidence import Loaded, Resumed, Saved
from pytest_fp8.questions.findings import some
from pytest_fp8.said import WorkloadError
from pytest_fp8.worker.answers.numerics import not_evaluated
from pytest_fp8.worker.checkpoint import stores
from pytest_fp8.worker.checkpoint.state import (
    BESIDES,
    EXTRA,
    extra_state,
    kept,
    load_optimizer,
    load_weights,
    optimizer_digests,
    optimizer_state,
    require_own,
    weights_of,
)
from pytest_fp8.worker.curve import curve
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.notes import untied
from pytest_fp8.worker.record.accuracy import is_product
from pytest_fp8.worker.record.probe import ProductChecks
from pytest_fp8.worker.tensors import digests, foreign, held, is_plain, plain_name
from pytest_fp8.worker.training.ranks import share_buffers, wait_for_all
from pytest_fp8.worker.training.step import innermost, inputs_noted, name_of
from pytest_fp8.zoo.batch import tensors_in

if TYPE_CHECKING:
    from pytest_fp8.worker.run.engine import Engine


def save(engine: Engine, folder: str, store: str, optimizer: bool) -> Saved:
    """Write the arm's state to ``folder``: the weights and, with ``optimizer``, what else training needs to go on."""
    share_buffers(engine.model)
    model, own = engine.model, store == OWN_STORE
    state = _held(engine, optimizer, own)
    before = flags_of(model)
    Path(folder).mkdir(parents=True, exist_ok=True)
    if own:
        _call_own(engine, "save", folder)
    else:
        _write(engine, Path(folder), store, optimizer)
    engine.synchronize()
    wait_for_all()
    weights, _ = weights_of(engine)
    now, on_disk = digests(weights), stores.dtypes_on_disk(Path(folder), store)
    return Saved(
        **state,
        flags=changed_flags(before, model),
        changed_by_saving=sorted(name for name, digest in state["digests"].items() if now.get(name) != digest),
        # Of our own stores the weights alone: an optimizer's state may be in FP8.
        on_disk=Counter(dtype for name, dtype in on_disk.items() if own or name in weights),
        frozen=sum(not engine.backend.is_checkpointed(key) for key in model.state_dict()),
        left_out=[] if own else extra_state(engine)[1],
        foreign=len(foreign(model, engine.optimizer)),
    )


def load(engine: Engine, folder: str, store: str, optimizer: bool, seed: int) -> Loaded:
    """Read ``folder`` into the arm. It begins anew with ``seed`` and other weights than those: both arms may have
    trained from one seed, and what a load leaves out must not be right by accident."""
    model, own = engine.model, store == OWN_STORE
    given = _given_by_build(engine, seed) if own else set()
    engine.restart(seed)
    weights, aliases = weights_of(engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if plain_name(name) in weights and plain_name(name) not in given:
                held(parameter).change(torch.neg)
        for name, buffer in model.named_buffers():
            if plain_name(name) in weights and buffer.is_floating_point():
                buffer.mul_(2)
    watch = StaleCopies(engine, own)
    before, flags, others = digests(weights), flags_of(model), len(foreign(model, engine.optimizer))
    apart = untied(*engine.weights)
    try:
        if own:
            _call_own(engine, "load", folder)
        else:
            apart |= _read(engine, Path(folder), store, optimizer, weights, aliases)
    except _Refused as refused:
        engine.park()
        return Loaded(untied=apart, refused=str(refused))
    state = _held(engine, optimizer, own)
    loaded = Loaded(
        **{**state, "untied": apart},
        flags=changed_flags(flags, model),
        untouched=sorted(name for name, digest in state["digests"].items() if before.get(name) == digest),
        strays=len(foreign(model, engine.optimizer)) > others,
        stale=watch.stale(),
        unchecked=watch.unchecked,
    )
    engine.renew_scales()
    engine.park()
    return loaded


def _given_by_build(engine: Engine, seed: int) -> set[str]:
    """Frozen weights that a user's ``build()`` gives alike for two seeds, as a pretrained base: who trains adapters
    saves these alone."""
    frozen = {plain_name(name) for name, each in engine.model.named_parameters() if not each.requires_grad}
    if not frozen:
        return set()
    one, two = (engine.setup.seeded_values(each)[0] for each in (0, seed))
    return {name for name in frozen & {*one} & {*two} if torch.equal(one[name], two[name])}


def resumed(engine: Engine, seed: int, first_step: int, steps: int) -> Resumed:
    """Train ``steps`` steps from where the arm is."""
    with inputs_noted(engine.model) as inputs:
        run = curve(engine, seed, steps, first_step=first_step)
    return Resumed(run["losses"], run["data"], inputs, kept(engine) if are_given(engine) else {})


def _held(engine: Engine, optimizer: bool, own: bool) -> dict[str, Any]:
    """The fields of :class:`pytest_fp8.questions.checkpoints.evidence.Held`."""
    weights, _ = weights_of(engine)
    return {
        "digests": digests(weights),
        "optimizer_digests": optimizer_digests(engine, optimizer_state(engine)[0]) if optimizer else {},
        "untied": untied(*engine.weights),
        "kept": kept(engine) if own else {},
    }


STALE = 3.0
"""Decibels below which a product is one of other weights than the layer's: an error of half its power. Unrelated
weights give -3, opposite ones -6, and a product in FP8 20 to 30."""


class StaleCopies:
    """Evaluates before a load, with weights that are far from those that will be loaded, and after it, and tells which
    FP8 layers then multiply by other weights than theirs: a copy of a weight that a layer keeps must be renewed by the
    load. Only trained weights count: of a frozen one a copy may be kept for good."""

    def __init__(self, engine: Engine, own_load: bool) -> None:
        """``own_load``: the workload's ``load()`` will load them. Where there is one it may renew copies by itself, so
        ``load_state_dict()`` alone is not asked to."""
        modules = dict(engine.model.named_modules())
        self._engine = engine
        self.layers = {n: m for n, m in modules.items() if engine.is_fp8_layer(m) and is_product(m) and _is_trained(m)}
        self.unchecked = ""
        """Why layers were not looked at, in words; empty where all were."""
        if self.layers and engine.backend.brings_model:
            self.unchecked = "the library computes FP8 layers without calling them"
        elif self.layers and are_given(engine) and not own_load:
            self.unchecked = "the workload's load() may renew them"
        else:
            self._evaluate()

    def stale(self) -> list[str]:
        """Plain names of the layers whose product is not that of their weights."""
        if self.unchecked or not self.layers:
            return []
        checks = ProductChecks(self._engine, self.layers)
        with checks.watching():
            self._evaluate()
        found = {} if self.unchecked else {check["layer"]: check["sqnr"] for check in checks.checks()}
        missed = [plain_name(name) for name in self.layers if name not in found]
        if missed and not self.unchecked:
            self.unchecked = f"an evaluation does not call {some(missed)} with rows of its width"
        return [plain_name(name) for name, sqnr in found.items() if sqnr < STALE]

    def _evaluate(self) -> None:
        error = not_evaluated(self._engine, 0, besides=set(self.layers.values())) if self.layers else None
        if error is not None:
            self.unchecked = f"no evaluation of the model: {error or 'its step calls parts of it, or there is no room'}"


def _is_trained(layer: torch.nn.Module) -> bool:
    """Whether its weight is a plain tensor, or plain in its shards, and trained."""
    weight = layer._parameters["weight"]
    return weight is not None and is_plain(weight) and weight.requires_grad and weight.dtype.itemsize > 1


# -- through a store of ours ------------------------------------------------------------------------------------------


def _write(engine: Engine, folder: Path, store: str, optimizer: bool) -> None:
    weights, _ = weights_of(engine)
    tree: dict[str, Any] = {EXTRA: extra_state(engine)[0]}
    if optimizer:
        require_own(engine)
        state, tree[BESIDES] = optimizer_state(engine)
        tree |= state
    try:
        stores.write(folder, store, weights, tree)
    except Exception as error:
        size = sum(tensor.nbytes for tensor in tensors_in([weights, tree]))
        # A full disk's message says how much room there must be.
        vars(error)["fp8_checkpoint"] = str(folder), size
        raise


def _read(
    engine: Engine,
    folder: Path,
    store: str,
    optimizer: bool,
    weights: dict[str, torch.Tensor],
    aliases: dict[str, str],
) -> dict[str, str]:
    """Gives the weights that the checkpoint has for themselves and the arm as others' second names."""
    stored, tree = stores.read(folder, store, engine.device, weights)
    extra, others = tree.pop(EXTRA), tree.pop(BESIDES, None)
    apart = {name: aliases[name] for name in stored if name in aliases}
    with _refusals(engine.model):
        load_weights(engine, {**stored, **extra}, aliases)
    # Free the copies before anything is computed: at 8B they are 15 GiB.
    stored.clear()
    if optimizer:
        with _refusals(innermost(engine.optimizer)):
            load_optimizer(engine, tree, others)
    return apart


class _Refused(Exception):
    """What a ``load_state_dict()`` raised."""


@contextmanager
def _refusals(whose: object) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:600]}"
        raise _Refused(f"load_state_dict() of {type(whose).__qualname__}: {what}") from error


# -- through the user's own functions ---------------------------------------------------------------------------------


def are_given(engine: Engine) -> bool:
    """Whether the workload brings ``save()`` and ``load()``."""
    return engine.setup.own is not None and engine.setup.own.save is not None


def _call_own(engine: Engine, which: str, folder: str) -> None:
    """Call the user's function. What it raises is one error that names it."""
    function: Callable[[Any, Any, Path], Any] | None = getattr(engine.setup.own, which, None)
    if function is None:
        raise WorkloadError("no_save")
    try:
        function(engine.wrapped, engine.optimizer, Path(folder))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:600]}"
        told = WorkloadError("checkpoint_raised", which=which, function=name_of(function), error=said)
        known = known_cause(error)
        if known[1]:
            told.fp8_code, told.fp8_cause, told.fp8_next = known
        raise told from error


def flags_of(model: torch.nn.Module) -> dict[str, bool]:
    """Modes of modules, and which parameters are trained: ``blocks.0.training``, ``up.weight.requires_grad``."""
    modes = {f"{plain_name(name) or 'model'}.training": module.training for name, module in model.named_modules()}
    return modes | {f"{plain_name(n)}.requires_grad": p.requires_grad for n, p in model.named_parameters()}


def changed_flags(before: dict[str, bool], model: torch.nn.Module) -> list[str]:
    """What was done to them since: ``model.training = False``."""
    return [f"{name} = {now}" for name, now in flags_of(model).items() if before.get(name, now) != now]
