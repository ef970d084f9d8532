"""What the user's own ``save()`` and ``load()`` carry, and what they lose. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import OwnLoaded, OwnSaved, Transfer
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.verdicts import Finding

EXACT = 1e-6
"""Relative difference of a number of the schedule or of a group that counts as none: the same rate, stored as float32
(6e-8) or computed again from the step."""
RECOMPUTED = 0.1
"""The same of an attribute of the optimizer, after both sides have trained on. A value that each step computes anew,
such as a gradient's norm, is then equal but for the precision: 5 to 11 % in emulated FP8 for whole gradients, less for
their norm. A counter that began again after four steps is half of the source's after eight."""
GONE = object()


def check_own(t: Transfer) -> Finding | None:
    """The first thing that did not arrive; ``None`` where all did."""
    if t.saved.own is None or t.loaded.own is None:
        return None
    found = _changed_by_saving(t.saved.own) or _weights(t, t.saved.own, t.loaded.own) or _strays(t.loaded.own)
    if found is None and t.with_optimizer:
        found = optimizer_lost(t) or _kept(t, t.saved.own, t.loaded.own)
    return found


def remarks(t: Transfer) -> list[str]:
    """What was lost and fails nothing, each in a few words."""
    saved, loaded = t.saved.own, t.loaded.own
    if saved is None or loaded is None:
        return []
    said = []
    drawn = [name for name in saved.drawn if loaded.kept.generators.get(name) != saved.kept.generators.get(name)]
    if drawn and t.with_optimizer:
        said.append(
            f"the state of the random generators ({some(drawn)}) is not carried: a resumed run draws other dropout "
            "masks or noise"
        )
    buffers = _differing(saved.kept.buffers, loaded.kept.buffers, 0.0)
    if buffers:
        said.append(f"buffers declared as not persistent are not carried: {some(list(buffers))}")
    return said


def narrowed(t: Transfer) -> list[str]:
    """Optimizer tensors that arrived in another dtype, as ``load_state_dict`` casts them."""
    return [key for key in _lost(t) if key in t.saved.narrowed and _arrived(t, key) == t.saved.narrowed[key]]


def _changed_by_saving(saved: OwnSaved) -> Finding | None:
    if not saved.changed_by_saving:
        return None
    return fail(
        K.CHANGED_BY_SAVING,
        "saving changed the model itself",
        expected="the same weights after save() as before it",
        seen=f"{len(saved.changed_by_saving)} changed: {some(list(saved.changed_by_saving))}",
        cause="save() casts or moves the live model (model.half(), model.to(...)) and not a copy",
        next_step="cast the tensors of the state dict: {name: w.to(dtype) for name, w in model.state_dict().items()}",
    )


def _strays(loaded: OwnLoaded) -> Finding | None:
    if not loaded.strays:
        return None
    return fail(
        K.STRAY_PARAMETERS,
        "after load() the optimizer steps parameters that the model does not have",
        expected="the parameters of the model in the optimizer, as before load()",
        seen="others",
        cause="load() put new parameters into the model: load_state_dict(assign=True), a module replaced, or a model "
        "built anew; the optimizer still holds the old ones, so training would move nothing",
        next_step="load in place: model.load_state_dict(state), or copy_ into each parameter",
    )


def _weights(t: Transfer, saved: OwnSaved, loaded: OwnLoaded) -> Finding | None:
    changed = [key for key, digest in t.saved.digests.items() if t.loaded.digests.get(key) != digest]
    if not changed:
        return None
    left = [key for key in changed if key in set(loaded.untouched)]
    if left:
        return _left(t, saved, changed, left)
    cast = _cast(t, saved, changed)
    if cast.startswith("float8") or any("F8" in dtype for dtype in t.saved.on_disk):
        return stored_in_fp8(f"{len(changed)} arrive rounded to FP8: {some(changed)}")
    if cast:
        return fail(
            K.CAST_ON_THE_WAY,
            f"weights were cast to {cast} on the way",
            expected="bit-equal weights after loading",
            seen=f"{len(changed)} arrive rounded to {cast}: {some(changed)}",
            cause=f"save() or load() casts to {cast}, which holds other values than the weights' own dtype",
            next_step="save the weights in the dtype that they have",
        )
    return fail(
        K.WEIGHTS_CHANGED,
        "weights changed on the way",
        expected="bit-equal weights after loading",
        seen=f"{len(changed)} differ: {some(changed)}",
        cause="save() or load() changes values, or an older file was read",
        next_step="compare model.state_dict() before save() with that after load()",
    )


def stored_in_fp8(seen: str) -> Finding:
    return fail(
        K.STORED_IN_FP8,
        "weights were stored in FP8",
        expected="high-precision weights on disk",
        seen=seen,
        cause="the FP8 copies were saved in place of the master weights",
        next_step="save the parameters, not the quantized workspaces",
    )


def _left(t: Transfer, saved: OwnSaved, changed: list[str], left: list[str]) -> Finding:
    """``left``: weights of the target that loading did not touch."""
    expected = f"all {len(t.saved.digests)} weights and buffers of the source"
    seen = f"{len(left)} hold what they held before load(): {some(left)}"
    if len(left) == len(t.saved.digests):
        return fail(
            K.NOTHING_LOADED,
            "load() loaded nothing",
            expected=expected,
            seen=seen,
            cause="keys that match no weight (a wrapper's prefix, _orig_mod. or module.), dropped by strict=False; or "
            "load() fills another model than the one that it is given",
            next_step="load with strict=True, and load in place what the function is given",
        )
    if set(changed) <= set(saved.buffers):
        return fail(
            K.BUFFERS_NOT_CARRIED,
            "buffers were not carried",
            expected=expected,
            seen=seen,
            cause="save() takes the parameters alone, and running statistics are buffers",
            next_step="save model.state_dict() in place of model.parameters() or named_parameters()",
        )
    return fail(
        K.WEIGHTS_MISSING,
        "weights were not loaded",
        expected=expected,
        seen=seen,
        cause="keys that were renamed or not saved, and a load that drops them (strict=False)",
        next_step="load with strict=True, and compare the stored keys with those of model.state_dict()",
    )


def _cast(t: Transfer, saved: OwnSaved, changed: Sequence[str]) -> str:
    """The dtype that every changed weight was rounded to, or an empty string."""
    for dtype, named in saved.casts.items():
        if all(named.get(key) == t.loaded.digests.get(key) for key in changed):
            return dtype
    return ""


def _lost(t: Transfer) -> list[str]:
    """Optimizer tensors that did not arrive, or arrived changed; and those that the source does not have."""
    source, target = t.saved.optimizer_digests, t.loaded.optimizer_digests
    return [key for key in {**source, **target} if source.get(key) != target.get(key)]


def optimizer_lost(t: Transfer) -> Finding | None:
    lost = sorted({*_lost(t)} - {*narrowed(t)})
    if not lost:
        return None
    have, want = len(t.loaded.optimizer_digests), len(t.saved.optimizer_digests)
    missing = [key for key in lost if _arrived(t, key) is None]
    if len(missing) == want:
        cause = "weights were loaded and the optimizer was not"
    elif missing:
        cause = "a part of the optimizer's state was not saved or not loaded"
    else:
        cause = "the optimizer's state was cast or changed on the way"
    return fail(
        K.OPTIMIZER_LOST,
        "the optimizer's state did not arrive",
        expected=f"{want} optimizer tensors, bit-equal",
        seen=f"{have} tensors; {len(lost)} lost or changed: {some(_plain(lost))}",
        cause=cause,
        next_step="save optimizer.state_dict(), and give it to optimizer.load_state_dict() before the next step",
    )


def _arrived(t: Transfer, key: str) -> Any:
    return t.loaded.optimizer_digests.get(key)


def _plain(keys: Sequence[str]) -> list[str]:
    return [key.removeprefix("optimizer/") for key in keys]


# -- schedule, groups, attributes -------------------------------------------------------------------------------------


def _kept(t: Transfer, saved: OwnSaved, loaded: OwnLoaded) -> Finding | None:
    """What is lost after loading, and still is after the steps that were trained on: a value that each step computes
    anew is none."""
    for what, code, headline, cause, next_step, close in _KINDS:
        source, target = getattr(saved.kept, what), getattr(loaded.kept, what)
        later = _differing(getattr(t.source.kept, what), getattr(t.resumed.kept, what), close)
        lost = {key: pair for key, pair in _differing(source, target, EXACT).items() if key in later}
        if lost:
            return fail(
                code,
                headline,
                expected="after load() what the source had when it saved",
                seen=some([_change(key, *pair) for key, pair in lost.items()]),
                cause=cause,
                next_step=next_step,
            )
    return None


_KINDS = (
    (
        "schedule",
        K.SCHEDULE_LOST,
        "the schedule is not where the source's was",
        "the schedule's state was not saved or not loaded: its next step starts from the wrong place",
        "save optimizer.scheduler.state_dict(), and give it to optimizer.scheduler.load_state_dict()",
        EXACT,
    ),
    (
        "groups",
        K.GROUPS_LOST,
        "entries of the optimizer's parameter groups were lost",
        "the optimizer's groups hold what each step reads (lr, betas, counts), and save() or load() leaves them out",
        "save the whole optimizer.state_dict(), and give it to optimizer.load_state_dict()",
        EXACT,
    ),
    (
        "attributes",
        K.ATTRIBUTES_LOST,
        "what the optimizer keeps as attributes was lost",
        "optimizer.state_dict() holds state and groups alone: averages of weights, counters and buffers that are "
        "attributes of the object are not in it",
        "save these attributes beside optimizer.state_dict(), or keep them in optimizer.state",
        RECOMPUTED,
    ),
)
"""Field of ``Kept``, code, headline, cause, next step, and the relative difference that is none after more steps."""


def _differing(source: Mapping[str, Any], target: Mapping[str, Any], close: float) -> dict[str, tuple[Any, Any]]:
    """Entry of the source -> (its value, the target's or :data:`GONE`), where they differ."""
    pairs = {key: (value, target.get(key, GONE)) for key, value in source.items()}
    return {key: pair for key, pair in pairs.items() if not _same(*pair, close)}


def _same(one: Any, other: Any, close: float) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=close) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _change(key: str, old: Any, new: Any) -> str:
    """``last_epoch 4 -> 0``."""
    if new is GONE:
        return f"{key} is missing"
    if isinstance(old, str) or isinstance(new, str):
        return f"{key} changed"
    return f"{key} {old:.6g} -> {new:.6g}"
