"""What a checkpoint can lose, as one table: how each loss is seen, and its code. Pure.

The rows are looked at in their order; the first that sees something is the verdict. Through pytest-fp8's own stores the
arm says by itself which keys match; of the user's own ``save()`` and ``load()`` both sides are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_fp8.codes import Code, K
from pytest_fp8.questions.checkpoints.evidence import Transfer
from pytest_fp8.questions.checkpoints.resuming import astray, losses, other_data, resume_limit
from pytest_fp8.questions.checkpoints.words import OWN, WITH_SCALES, WORDS
from pytest_fp8.questions.findings import some, tell
from pytest_fp8.verdicts import Finding, Verdict

EXACT = 1e-6
"""Relative difference of a number of the schedule or of a group that counts as none: the same rate, stored as float32
(6e-8) or computed again from the step."""
RECOMPUTED = 0.1
"""The same of an attribute of the optimizer, after both sides have trained on. A value that each step computes anew,
such as a gradient's norm, is then equal but for the precision: 5 to 11 % in emulated FP8 for whole gradients, less for
their norm. A counter that began again after four steps is half of the source's after eight."""
GONE = object()
NOT_JUDGED = (K.OUTPUTS_NOT_FINITE, K.DATA_NOT_CARRIED, K.SOURCE_DIVERGED)
"""These are no fault of the checkpoint, and nothing can be said of it: INVALID."""

Seen = Mapping[str, Any]
"""``seen`` in words, and what the words of the code leave open."""


class Row(NamedTuple):
    code: Code
    expected: str
    look: Callable[[Transfer], str | Seen | None]
    """What is seen of the loss; empty or ``None`` where there is none."""


def first_lost(t: Transfer) -> Finding | None:
    """The first thing that did not arrive; ``None`` where all did."""
    for row in OF_OWN if t.saved.own is not None else OF_STORES:
        found = row.look(t)
        if found:
            seen: dict[str, Any] = {"seen": found} if isinstance(found, str) else dict(found)
            expected = row.expected.format(**{"count": len(t.saved.keys), "limit": t.logit_limit, **seen})
            words = {**WORDS, **(OWN if t.saved.own else {}), **(WITH_SCALES if t.keeps_scales else {})}
            verdict = Verdict.INVALID if row.code in NOT_JUDGED else Verdict.FAIL
            return tell(words, row.code, expected, seen.pop("seen"), verdict, **seen)
    return None


# -- weights ----------------------------------------------------------------------------------------------------------


def _named(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}: {some(list(names))}" if names else ""


def _changed(t: Transfer) -> list[str]:
    return [key for key, digest in t.saved.digests.items() if t.loaded.digests.get(key) != digest]


def _in_fp8(t: Transfer) -> bool:
    return any("F8" in dtype or "float8" in dtype for dtype in t.saved.on_disk)


def _untied(t: Transfer) -> Seen | None:
    for name, other in {**t.saved.untied, **t.loaded.untied}.items():
        if name in t.loaded.missing or name not in t.loaded.digests:
            seen = f"{name} has values of its own in FP8, and no place beside {other} in BF16"
            return {"name": name, "other": other, "seen": seen}
    return None


def _stale(t: Transfer) -> Seen | None:
    load = "load_state_dict" if t.saved.own is None else "load()"
    seen = f"after an evaluation, {load} and another evaluation these layers still multiply by the old weights: "
    stale = t.loaded.stale
    return {"load": load, "layers": len(stale), "seen": seen + some(stale)} if stale else None


def _untouched(t: Transfer) -> list[str]:
    """Changed weights that hold what they held before the load."""
    return [key for key in _changed(t) if key in set(t.loaded.untouched)]


def _unloaded(t: Transfer, are_these: bool = True) -> str:
    return _named("hold what they held before the load", _untouched(t) if are_these else [])


def _nothing_loaded(t: Transfer) -> str:
    return _unloaded(t, len(_untouched(t)) == len(t.saved.digests))


def _buffers_alone(t: Transfer) -> bool:
    return t.saved.own is not None and {*_changed(t)} <= {*t.saved.own.buffers}


def _cast(t: Transfer) -> str:
    """The dtype that all changed weights were cast to on the way; empty where they were not."""
    casts, changed, now = t.saved.own.casts if t.saved.own else {}, _changed(t), t.loaded.digests
    return next((dtype for dtype, to in casts.items() if all(to.get(key) == now.get(key) for key in changed)), "")


def _cast_on_the_way(t: Transfer) -> Seen | None:
    seen = _named(f"arrive rounded to {_cast(t)}", _changed(t) if _cast(t) else [])
    return {"dtype": _cast(t), "seen": seen} if seen else None


# -- the rest of the training state -----------------------------------------------------------------------------------


def _lost(t: Transfer) -> list[str]:
    """Optimizer tensors that did not arrive, or arrived changed; and those that the source does not have."""
    source, target = t.saved.optimizer_digests, t.loaded.optimizer_digests
    return [key for key in {**source, **target} if source.get(key) != target.get(key)]


def narrowed(t: Transfer) -> list[str]:
    """Optimizer tensors that arrived in another dtype, as ``load_state_dict`` casts them."""
    arrived = t.loaded.optimizer_digests
    return [key for key in _lost(t) if key in t.saved.narrowed and arrived.get(key) == t.saved.narrowed[key]]


def _optimizer(t: Transfer) -> Seen | None:
    lost = sorted({*_lost(t)} - {*narrowed(t)}) if t.with_optimizer else []
    if not lost:
        return None
    have, want = len(t.loaded.optimizer_digests), len(t.saved.optimizer_digests)
    missing = [key for key in lost if t.loaded.optimizer_digests.get(key) is None]
    if len(missing) == want:
        why = "weights were loaded and the optimizer was not"
    elif missing:
        why = "a part of the optimizer's state was not saved or not loaded"
    else:
        why = "the optimizer's state was cast or changed on the way"
    names = some([key.removeprefix("optimizer/") for key in lost])
    return {"want": want, "why": why, "seen": f"{have} tensors; {len(lost)} lost or changed: {names}"}


def _kept(t: Transfer, what: str, close: float) -> str:
    """What is lost after loading, and still is after the steps that were trained on: a value that each step computes
    anew is none."""
    saved, loaded = t.saved.own, t.loaded.own
    if saved is None or loaded is None or not t.with_optimizer:
        return ""
    later = differing(getattr(t.source.kept, what), getattr(t.resumed.kept, what), close)
    lost = differing(getattr(saved.kept, what), getattr(loaded.kept, what), EXACT)
    return some([_change(key, *pair) for key, pair in lost.items() if key in later])


def differing(source: Mapping[str, Any], target: Mapping[str, Any], close: float) -> dict[str, tuple[Any, Any]]:
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


# -- what the loaded model computes -----------------------------------------------------------------------------------


def _not_finite(t: Transfer) -> str:
    seen = f"values that are not finite, in the source of {t.direction}; all weights arrived bit-equal"
    return seen if math.isnan(t.logit_distance) else ""


def _is_far(t: Transfer) -> bool:
    return not t.logit_distance <= t.logit_limit


def _other_input(t: Transfer) -> str:
    seen = f"other input for the same batch; outputs {t.logit_distance:.3f} apart (relative L2)"
    return seen if _is_far(t) and not t.same_input else ""


def _source_diverged(t: Transfer) -> Seen | None:
    source, resumed = t.source.losses, t.resumed.losses
    if not astray(t) or all(map(math.isfinite, source)):
        return None
    return {"arm": t.arms[0].upper(), "seen": f"{losses(source)} of the source, {losses(resumed)} resumed"}


def _goes_elsewhere(t: Transfer) -> Seen | None:
    if not astray(t):
        return None
    source, resumed = t.source.losses, t.resumed.losses
    gap = sum(resumed) / len(resumed) - sum(source) / len(source)
    limit = f"{resume_limit(source, t.start):.3g}"
    return {"losses": losses(source), "within": limit, "seen": f"{losses(resumed)} ({gap:+.3g})"}


ONE_HOME = "all {count} weights, each with one home"
BIT_EQUAL = "bit-equal weights after loading"
IN_HIGH_PRECISION = "high-precision weights on disk"
ALL = "all {count} weights and buffers of the source"
LIKE_THE_SOURCE = "after load() what the source had when it saved"
SAME_BATCHES = "the batches that the source trained on after saving"

STALE = Row(K.STALE_COPIES, "an evaluation after {load} multiplies by the loaded weights", _stale)
OPTIMIZER = Row(K.OPTIMIZER_LOST, "{want} optimizer tensors, bit-equal", _optimizer)
CHANGED = Row(K.WEIGHTS_CHANGED, BIT_EQUAL, lambda t: _named("differ", _changed(t)))
COMPUTES = (
    Row(K.OUTPUTS_NOT_FINITE, "finite outputs of the arm that saved, after a few steps of training", _not_finite),
    Row(K.DATA_NOT_CARRIED, SAME_BATCHES, _other_input),
    Row(
        K.COMPUTES_OTHERWISE,
        "logits within {limit:.3f} of the source's (relative L2)",
        lambda t: f"{t.logit_distance:.3f}" if _is_far(t) else "",
    ),
    Row(K.DATA_NOT_CARRIED, SAME_BATCHES, other_data),
    Row(
        K.SOURCE_DIVERGED,
        "finite losses of the arm that saved, to compare those of the arm that loaded with",
        _source_diverged,
    ),
    Row(K.DOES_NOT_GO_ON, "the source's losses {losses} within {within} on average", _goes_elsewhere),
)
OF_STORES = (
    Row(K.STORED_IN_FP8, "high-precision weights on disk", lambda t: f"{dict(t.saved.on_disk)}" if _in_fp8(t) else ""),
    Row(K.UNTIED, "{name} to stay one with {other}", _untied),
    Row(K.WEIGHTS_MISSING, ONE_HOME, lambda t: some(list(t.loaded.missing))),
    Row(K.KEYS_WITHOUT_A_HOME, ONE_HOME, lambda t: some(list(t.loaded.unexpected))),
    Row(K.OTHER_SHAPE, ONE_HOME, lambda t: some(list(t.loaded.wrong_shape))),
    Row(
        K.LOAD_REFUSED,
        "load_state_dict() takes the other arm's state dict: the target's own keys, without scaling state",
        lambda t: {"source": t.arms[0], "target": t.arms[1], "seen": t.loaded.refused} if t.loaded.refused else None,
    ),
    Row(K.NOTHING_LOADED, BIT_EQUAL, _nothing_loaded),
    *(CHANGED, STALE, OPTIMIZER, *COMPUTES),
)
OF_OWN = (
    Row(
        K.CHANGED_BY_SAVING,
        "the same weights after save() as before it",
        lambda t: _named("changed", t.saved.own.changed_by_saving if t.saved.own else []),
    ),
    Row(K.NOTHING_LOADED, ALL, _nothing_loaded),
    Row(K.BUFFERS_NOT_CARRIED, ALL, lambda t: _unloaded(t, _buffers_alone(t))),
    Row(K.WEIGHTS_MISSING, ALL, _unloaded),
    Row(
        K.STORED_IN_FP8,
        IN_HIGH_PRECISION,
        lambda t: _named("arrive rounded to FP8", _changed(t) if _in_fp8(t) or "float8" in _cast(t) else []),
    ),
    Row(K.CAST_ON_THE_WAY, BIT_EQUAL, _cast_on_the_way),
    CHANGED,
    Row(
        K.STRAY_PARAMETERS,
        "the parameters of the model in the optimizer, as before load()",
        lambda t: "others" if t.loaded.own and t.loaded.own.strays else "",
    ),
    OPTIMIZER,
    Row(K.SCHEDULE_LOST, LIKE_THE_SOURCE, lambda t: _kept(t, "schedule", EXACT)),
    Row(K.GROUPS_LOST, LIKE_THE_SOURCE, lambda t: _kept(t, "groups", EXACT)),
    Row(K.ATTRIBUTES_LOST, LIKE_THE_SOURCE, lambda t: _kept(t, "attributes", RECOMPUTED)),
    *(STALE, *COMPUTES),
)
