"""Can I switch back? Checkpoints carried both ways between the arms, and what they can lose, as one table. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pytest_fp8.case import OWN_STORE as OWN
from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer
from pytest_fp8.questions.findings import finding, some
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "checkpoints"
LOGITS = (0.05, 1.0)
"""Bounds of the limit on the logits' relative distance: at least 5 %, and below that of unrelated weights (1.4).
docs/limits.md says where each number is from."""
TRAINED = 4.0
"""Factor on the distance at the start."""
OF_MOVED = 2.0
"""Factor on the largest distance that moved weights make."""
FEW, OF_FEW = 64, 0.25
"""Below so many values the output is a loss, or a few of them, and no logits: one number says little of a distance.
The least limit for these."""
LEAST_NATS, MOST_NATS = 0.05, 14.0
"""The least limit on the mean of resumed losses, in nats per token; of a loss below 1 that share of it. And what no
loss in nats per token exceeds: guessing among a million tokens costs that. A larger one is a sum over the batch, or
has a unit of its own."""
OF_A_SUM = 0.01
"""The least limit for such a loss, as a share of it."""
MOST = 0.25
"""The largest limit, as a share of the largest loss: FP8 that differs by more is the loss question's matter."""
EXACT = 1e-6
"""Relative difference of a number of the schedule or of a group that counts as none: the same rate, stored as float32
(6e-8) or computed again from the step."""
RECOMPUTED = 0.1
"""The same of an attribute of the optimizer, after both sides have trained on. A value that each step computes anew,
such as a gradient's norm, is then equal but for the precision: 5 to 11 % in emulated FP8 for whole gradients, less for
their norm. A counter that began again after four steps is half of the source's after eight."""
GONE = object()
NOT_JUDGED = (K.SOURCE_NOT_FINITE, K.DATA_NOT_CARRIED)
"""These are no fault of the checkpoint, and nothing can be said of it: INVALID."""


@dataclass(frozen=True)
class CheckpointFigures(Figures):
    transfers: Sequence[Mapping[str, Any]]
    """Of each checkpoint that was carried: its way; the outputs' relative L2 distance from the source's and its limit;
    the losses of the steps that the target and the source went on to train."""


def _figures(t: Transfer) -> dict[str, Any]:
    way = {"direction": t.direction, "store": t.store, "logits": t.logit_distance, "limit": logit_limit(t.start)}
    return {**way, "resumed": list(t.resumed.losses), "source": list(t.source.losses)}


def check_checkpoints(transfers: Sequence[Transfer]) -> Decision:
    """Every transfer must carry every weight and, where asked, the optimizer, and training must go on as it was."""
    figures = CheckpointFigures([_figures(t) for t in transfers])
    for transfer in transfers:
        if lost := first_lost(transfer):
            if lost.code in (K.COMPUTES_OTHERWISE, K.DOES_NOT_GO_ON):
                lost = next(filter(None, map(_left_behind, transfers)), lost)
            where = f"{transfer.direction} through {transfer.store}: {lost.headline}"
            return replace(lost, headline=where).answer(QUESTION, figures)
    ways = ", ".join(f"{t.direction} ({t.store}{', resumed' if t.with_optimizer else ''})" for t in transfers)
    saved = transfers[0].saved
    what = f"{len(saved.digests)} weights"
    if saved.frozen:
        what = f"{len(saved.digests)} adapter weights (of {saved.frozen} frozen tensors none is stored)"
    more = "".join(f"; {remark}" for remark in dict.fromkeys(one for t in transfers for one in _remarks(t)))
    return passed(f"{what} bit-equal after {ways}{more}").answer(QUESTION, figures)


def first_lost(t: Transfer) -> Finding | None:
    """The first thing that did not arrive; ``None`` where all did."""
    for row in ROWS:
        if seen := row.look(t):
            given: dict[str, Any] = {"seen": seen} if isinstance(seen, str) else dict(seen)
            expected = row.expected.format(count=len(t.saved.digests), limit=logit_limit(t.start), **given)
            verdict = Verdict.INVALID if row.code in NOT_JUDGED else Verdict.FAIL
            return finding(row.code, expected, given.pop("seen"), verdict, **given)
    return None


def _remarks(t: Transfer) -> list[str]:
    """What is not compared, and what was lost and fails nothing, each in a few words."""
    said = []
    if t.store == OWN and t.with_optimizer:
        said.append("states of random generators and buffers that are not persistent are not compared")
        if t.saved.foreign:
            said.append(
                f"{t.saved.foreign} parameters of the optimizer are none of the model's, such as master copies: only "
                "save() and load() carry the optimizer, and of the state of these parameters the resumed losses tell"
            )
    if t.loaded.unchecked:
        said.append(f"whether loading renews FP8 copies of weights was not checked: {t.loaded.unchecked}")
    return [*said, *([f"left out: {some(list(t.saved.left_out))}"] if t.saved.left_out else [])]


# -- weights ----------------------------------------------------------------------------------------------------------


Seen = Mapping[str, Any]
"""``seen`` in words, and what the row and the words of the code leave open."""


class Row(NamedTuple):
    code: K
    expected: str
    look: Callable[[Transfer], str | Seen | None]
    """What is seen of the loss; empty or ``None`` where there is none."""


def _named(what: str, names: Sequence[str]) -> str:
    return f"{len(names)} {what}: {some(list(names))}" if names else ""


def _changed(t: Transfer) -> list[str]:
    return [key for key, digest in t.saved.digests.items() if t.loaded.digests.get(key) != digest]


def _untouched(t: Transfer) -> str:
    """The changed weights that hold what they held before the load."""
    untouched = set(t.loaded.untouched)
    return _named("hold what they held before the load", [key for key in _changed(t) if key in untouched])


def _in_fp8(t: Transfer) -> str:
    """The user's own file may hold FP8 copies beside the weights, so that only what changed counts."""
    in_fp8 = any("F8" in dtype or "float8" in dtype for dtype in t.saved.on_disk)
    changed = _named("arrive changed", _changed(t)) if t.store == OWN else f"{dict(t.saved.on_disk)}"
    return changed if in_fp8 else ""


def _untied(t: Transfer) -> Seen | None:
    for name, other in {**t.saved.untied, **t.loaded.untied}.items():
        if name not in t.loaded.digests:
            seen = f"{name} has values of its own in FP8, and no place beside {other} in BF16"
            return {"name": name, "other": other, "seen": seen}
    return None


def _refused(t: Transfer) -> Seen | None:
    return {"source": t.arms[0], "target": t.arms[1], "seen": t.loaded.refused} if t.loaded.refused else None


# -- the rest of the training state -----------------------------------------------------------------------------------


def _optimizer(t: Transfer) -> Seen | None:
    """Optimizer tensors that did not arrive, or arrived changed; and those that the source does not have."""
    source, target = t.saved.optimizer_digests, t.loaded.optimizer_digests
    lost = sorted(key for key in {**source, **target} if source.get(key) != target.get(key))
    names = some([key.removeprefix("optimizer/") for key in lost])
    seen = f"{len(target)} tensors; {len(lost)} lost or changed: {names}"
    return {"want": len(source), "seen": seen} if lost and t.with_optimizer else None


KEPT = {
    "schedule": ("schedule", EXACT),
    "groups": ("optimizer's parameter groups", EXACT),
    "attributes": ("attributes of the optimizer", RECOMPUTED),
}
"""What an arm keeps beside its weights -> in words, and how close a value must be after both sides trained on."""


def _state_lost(t: Transfer) -> Seen | None:
    """What is lost after loading, and still is after the steps that were trained on: a value that each step computes
    anew is none."""
    for kind, (what, close) in KEPT.items() if t.with_optimizer else ():
        later = _differing(t.source.kept.get(kind, {}), t.resumed.kept.get(kind, {}), close)
        lost = _differing(t.saved.kept.get(kind, {}), t.loaded.kept.get(kind, {}), EXACT)
        if seen := [_change(key, *pair) for key, pair in lost.items() if key in later]:
            return {"what": what, "seen": some(seen)}
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


# -- what the loaded model computes, and whether its training goes on where the source was ----------------------------


def logit_limit(start: Apart) -> float:
    """Four times the distance that the two precisions show on one and the same weights, within :data:`LOGITS`.

    A few steps of training move it. Where that is not enough, twice what moved weights do to the trained model: a
    router that is undecided after training need not have been so at the start.
    """
    least = OF_FEW if start.values < FEW else LOGITS[0]
    return min(max(TRAINED * start.logits, OF_MOVED * max(start.moved_logits, default=0.0), least), LOGITS[1])


def resume_limit(losses: Sequence[float], start: Apart) -> float:
    """How far the mean of the resumed losses may lie from the source's.

    0.05, as nats per token; below a loss of 1 that share of the largest, which no change of sign brings to zero; above
    :data:`MOST_NATS` a share of it, too. Where the precisions themselves differ by more on average over the first steps
    from the same weights, or moved weights make the reference's own loss differ by more, twice that and at most
    :data:`MOST` of the largest: a loss that is a small difference of large numbers shows FP8's rounding in full.
    """
    largest = max((abs(loss) for loss in losses), default=math.nan)
    least = OF_A_SUM * largest if largest > MOST_NATS else LEAST_NATS * min(1.0, largest)
    apart = max(abs(each) for each in (start.losses, *start.moved_losses))
    return max(least, min(2 * apart, MOST * largest))


def is_far(t: Transfer) -> bool:
    """Whether the loaded model computes something else."""
    return not t.logit_distance <= logit_limit(t.start)


def is_astray(t: Transfer) -> bool:
    """Whether training does not go on where the source was; asked of transfers that carry the optimizer."""
    return t.with_optimizer and not (abs(_gap(t)) <= resume_limit(t.source.losses, t.start) and math.isfinite(_gap(t)))


def _gap(t: Transfer) -> float:
    """Of the mean losses; no number or infinite where one is not finite."""
    source, resumed = t.source.losses, t.resumed.losses
    return sum(resumed) / len(resumed) - sum(source) / len(source)


def _not_finite(t: Transfer) -> str:
    seen = f"values that are not finite, in the source of {t.direction}; all weights arrived bit-equal"
    return seen if math.isnan(t.logit_distance) else ""


def _other_data(t: Transfer) -> str:
    """What is seen where the target was given other data than the source, so that the comparison is none.

    What a model computes for its own input differs with the precision, so inputs count only where outputs or losses
    differ. How often one batch enters may depend on the losses: LBFGS ends its iterations early.
    """
    if is_far(t) and not t.same_input:
        return f"other input for the same batch; outputs {t.logit_distance:.3f} apart (relative L2)"
    others = t.source.data != t.resumed.data or (is_astray(t) and {*t.source.inputs} != {*t.resumed.inputs})
    seen = f"losses {_losses(t.resumed.losses)} after {_losses(t.source.losses)} of the source"
    return f"other batches for the same steps; {seen}" if t.with_optimizer and others else ""


def _left_behind(t: Transfer) -> Finding | None:
    """Modes and trained parameters that ``save()`` or ``load()`` leaves changed: the cause where a model computes
    or trains otherwise, through whatever store."""
    for which, arm, flags in ("save", t.arms[0], t.saved.flags), ("load", t.arms[1], t.loaded.flags):
        if flags:
            expected = f"modes of modules and trained parameters after {which}() as before it"
            return finding(K.STATE_LEFT_BEHIND, expected, some(list(flags)), which=which, arm=arm)
    return None


def _goes_elsewhere(t: Transfer) -> Seen | None:
    if not is_astray(t):
        return None
    within = f"{resume_limit(t.source.losses, t.start):.3g}"
    seen = f"{_losses(t.resumed.losses)} ({_gap(t):+.3g})"
    return {"losses": _losses(t.source.losses), "within": within, "seen": seen}


def _source_diverged(t: Transfer) -> str:
    seen = f"{_losses(t.source.losses)} of the source, {_losses(t.resumed.losses)} resumed"
    return seen if is_astray(t) and not all(map(math.isfinite, t.source.losses)) else ""


def _losses(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


ROWS = (
    Row(
        K.CHANGED_BY_SAVING,
        "the same weights after save() as before it",
        lambda t: _named("changed", t.saved.changed_by_saving),
    ),
    Row(K.UNTIED, "{name} to stay one with {other}", _untied),
    Row(K.LOAD_REFUSED, "load_state_dict() takes the other arm's keys, without scaling state", _refused),
    Row(K.WEIGHTS_MISSING, "all {count} weights and buffers of the source, each with one home", _untouched),
    Row(K.STORED_IN_FP8, "high-precision weights on disk", _in_fp8),
    Row(K.WEIGHTS_CHANGED, "bit-equal weights after loading", lambda t: _named("differ", _changed(t))),
    Row(
        K.STRAY_PARAMETERS,
        "the parameters of the model in the optimizer, as before load()",
        lambda t: "others" if t.loaded.strays else "",
    ),
    Row(K.OPTIMIZER_LOST, "{want} optimizer tensors, bit-equal", _optimizer),
    Row(K.STATE_LOST, "after load() what the source had when it saved", _state_lost),
    Row(
        K.STALE_COPIES,
        "an evaluation after a load multiplies by the loaded weights",
        lambda t: _named("layers still multiply by the old weights", t.loaded.stale),
    ),
    Row(K.SOURCE_NOT_FINITE, "finite outputs of the arm that saved, after a few steps of training", _not_finite),
    Row(K.DATA_NOT_CARRIED, "the batches that the source trained on after saving", _other_data),
    Row(
        K.COMPUTES_OTHERWISE,
        "logits within {limit:.3f} of the source's (relative L2)",
        lambda t: f"{t.logit_distance:.3f}" if is_far(t) else "",
    ),
    Row(
        K.SOURCE_NOT_FINITE, "finite losses of the arm that saved, to compare those of the other with", _source_diverged
    ),
    Row(K.DOES_NOT_GO_ON, "the source's losses {losses} within {within} on average", _goes_elsewhere),
)
"""What a checkpoint can lose, in the order in which it is looked at: the first that is seen is the verdict."""
