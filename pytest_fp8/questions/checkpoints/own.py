"""What the user's own ``save()`` and ``load()`` carry, and what they lose. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import OwnLoaded, OwnSaved, Transfer
from pytest_fp8.questions.checkpoints.words import OWN, WORDS
from pytest_fp8.questions.findings import some, tell
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
    saved, loaded = t.saved.own, t.loaded.own
    return next(_lost_by(t, saved, loaded), None) if saved is not None and loaded is not None else None


def _lost_by(t: Transfer, saved: OwnSaved, loaded: OwnLoaded) -> Iterator[Finding]:
    if names := saved.changed_by_saving:
        expected, seen = "the same weights after save() as before it", f"{len(names)} changed: {some(list(names))}"
        yield tell(OWN, K.CHANGED_BY_SAVING, expected, seen)
    if changed := changed_weights(t):
        yield _weights(t, saved, loaded, changed)
    if loaded.strays:
        yield tell(OWN, K.STRAY_PARAMETERS, "the parameters of the model in the optimizer, as before load()", "others")
    if t.with_optimizer:
        yield from filter(None, (optimizer_lost(t), _kept(t, saved, loaded)))


def changed_weights(t: Transfer) -> list[str]:
    return [key for key, digest in t.saved.digests.items() if t.loaded.digests.get(key) != digest]


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
    if saved.foreign and t.with_optimizer:
        said.append(
            f"{saved.foreign} parameters of the optimizer are none of the model's, such as master copies: only save() "
            "and load() carry the optimizer, and of the state of these parameters the resumed losses tell"
        )
    buffers = _differing(saved.kept.buffers, loaded.kept.buffers, 0.0)
    if buffers:
        said.append(f"buffers declared as not persistent are not carried: {some(list(buffers))}")
    return said


def narrowed(t: Transfer) -> list[str]:
    """Optimizer tensors that arrived in another dtype, as ``load_state_dict`` casts them."""
    arrived = t.loaded.optimizer_digests
    return [key for key in _lost(t) if key in t.saved.narrowed and arrived.get(key) == t.saved.narrowed[key]]


def _weights(t: Transfer, saved: OwnSaved, loaded: OwnLoaded, changed: Sequence[str]) -> Finding:
    if left := [key for key in changed if key in set(t.loaded.untouched)]:
        code = K.BUFFERS_NOT_CARRIED if set(changed) <= set(saved.buffers) else K.WEIGHTS_MISSING
        code = K.NOTHING_LOADED if len(left) == len(t.saved.digests) else code
        expected = f"all {len(t.saved.digests)} weights and buffers of the source"
        return tell(OWN, code, expected, f"{len(left)} hold what they held before load(): {some(left)}")
    now = t.loaded.digests
    casts = (dtype for dtype, to in saved.casts.items() if all(to.get(key) == now.get(key) for key in changed))
    cast, expected = next(casts, ""), "bit-equal weights after loading"
    if cast.startswith("float8") or any("F8" in dtype for dtype in t.saved.on_disk):
        return stored_in_fp8(f"{len(changed)} arrive rounded to FP8: {some(changed)}")
    if cast:
        seen = f"{len(changed)} arrive rounded to {cast}: {some(changed)}"
        return tell(OWN, K.CAST_ON_THE_WAY, expected, seen, dtype=cast)
    return tell(OWN, K.WEIGHTS_CHANGED, expected, f"{len(changed)} differ: {some(changed)}")


def stored_in_fp8(seen: str) -> Finding:
    return tell(WORDS, K.STORED_IN_FP8, "high-precision weights on disk", seen)


def _lost(t: Transfer) -> list[str]:
    """Optimizer tensors that did not arrive, or arrived changed; and those that the source does not have."""
    source, target = t.saved.optimizer_digests, t.loaded.optimizer_digests
    return [key for key in {**source, **target} if source.get(key) != target.get(key)]


def optimizer_lost(t: Transfer) -> Finding | None:
    lost = sorted({*_lost(t)} - {*narrowed(t)})
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
    seen = f"{have} tensors; {len(lost)} lost or changed: {names}"
    return tell(WORDS, K.OPTIMIZER_LOST, f"{want} optimizer tensors, bit-equal", seen, why=why)


def _kept(t: Transfer, saved: OwnSaved, loaded: OwnLoaded) -> Finding | None:
    """What is lost after loading, and still is after the steps that were trained on: a value that each step computes
    anew is none."""
    for what, code, close in (
        ("schedule", K.SCHEDULE_LOST, EXACT),
        ("groups", K.GROUPS_LOST, EXACT),
        ("attributes", K.ATTRIBUTES_LOST, RECOMPUTED),
    ):
        source, target = getattr(saved.kept, what), getattr(loaded.kept, what)
        later = _differing(getattr(t.source.kept, what), getattr(t.resumed.kept, what), close)
        lost = {key: pair for key, pair in _differing(source, target, EXACT).items() if key in later}
        if lost:
            seen = some([_change(key, *pair) for key, pair in lost.items()])
            return tell(OWN, code, "after load() what the source had when it saved", seen)
    return None


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


def left_behind(transfers: Sequence[Transfer]) -> Finding | None:
    """Modes and trained parameters that ``save()`` or ``load()`` leaves changed in one arm alone. Asked where a loaded
    model computes or trains otherwise."""
    own = {t.arms: t for t in transfers if t.saved.own and t.loaded.own}
    for which in ("save", "load"):
        arms: dict[str, Mapping[str, Sequence[str]]] = {}
        for (source, target), t in own.items():
            arm, said = (source, t.saved.own) if which == "save" else (target, t.loaded.own)
            arms[arm] = said.flags if said is not None else {}
        for arm, flags in arms.items():
            if flags and any(flags != other for other in arms.values()):
                expected = f"modes of modules and trained parameters after {which}() as before it, as in the other arm"
                seen = "; ".join(f"{words}: {some(list(names))}" for words, names in flags.items())
                return tell(OWN, K.STATE_LEFT_BEHIND, expected, seen, which=which, arm=arm)
    return None
