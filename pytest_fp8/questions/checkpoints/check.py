"""Can I switch back? Checkpoints carried both ways between the arms. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer
from pytest_fp8.questions.checkpoints.own import (
    changed_weights,
    check_own,
    left_behind,
    narrowed,
    optimizer_lost,
    remarks,
    stored_in_fp8,
)
from pytest_fp8.questions.checkpoints.resuming import check_resumed, other_data
from pytest_fp8.questions.checkpoints.scales import check_scales, words_on_scales
from pytest_fp8.questions.checkpoints.words import WITH_SCALES, WORDS
from pytest_fp8.questions.findings import some, tell
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "checkpoints"
LOGITS = (0.05, 1.0)
"""Bounds of the limit on the logits' relative distance: at least 5 %, and below that of unrelated weights (1.4).
docs/limits.md says where each number is from."""
TRAINED = 4.0
"""Factor on the distance at the start."""
OF_MOVED = 2.0
"""Factor on the largest distance that moved weights make."""
FEW = 64
"""Below so many values the output is a loss, or a few of them, and no logits: one number says little of a distance."""
OF_FEW = 0.25
"""The least limit for these."""


def logit_limit(start: Apart) -> float:
    """Four times the distance that the two precisions show on one and the same weights, within :data:`LOGITS`.

    A few steps of training move it. Where that is not enough, twice what moved weights do to the trained model: a
    router that is undecided after training need not have been so at the start.
    """
    least = OF_FEW if start.values < FEW else LOGITS[0]
    return min(max(TRAINED * start.logits, OF_MOVED * max(start.moved_logits, default=0.0), least), LOGITS[1])


@dataclass(frozen=True)
class TransferFigures:
    """One checkpoint that was carried."""

    direction: str
    store: str
    logits: float
    """Relative L2 distance of the outputs after loading from the source's."""
    limit: float
    bytes: int
    resumed: tuple[float, ...]
    """Losses of the steps that the target went on to train."""
    source: tuple[float, ...]
    """The source's losses of the same steps."""
    scaling_state: int
    """Tensors of scaling state, which are left out."""
    frozen: int
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointFigures(Figures):
    transfers: tuple[TransferFigures, ...]


def _figures(t: Transfer) -> TransferFigures:
    return TransferFigures(
        direction=t.direction,
        store=t.store,
        logits=t.logit_distance,
        limit=t.logit_limit,
        bytes=t.saved.bytes,
        resumed=tuple(t.resumed.losses),
        source=tuple(t.source.losses),
        scaling_state=len(t.saved.scaling_state),
        frozen=t.saved.frozen,
        remarks=tuple(_remarks(t)),
    )


def check_checkpoints(transfers: Sequence[Transfer]) -> Decision:
    """Every transfer must carry every weight and, where asked, the optimizer, and training must go on as it was."""
    figures = CheckpointFigures(tuple(_figures(t) for t in transfers))
    for transfer in transfers:
        for rule in _OWN_RULES if transfer.saved.own is not None else _RULES:
            found = rule(transfer)
            if found is not None:
                left = left_behind(transfers) if rule in (_logits, check_resumed) else None
                direction = "fp8 -> fp8" if rule is check_scales else transfer.direction
                where = f"{direction} through {transfer.store}: {found.headline}"
                said = replace(left, seen=f"{left.seen}; {where}") if left else replace(found, headline=where)
                return said.answer(QUESTION, figures)
    ways = ", ".join(f"{t.direction} ({t.store}{', resumed' if t.with_optimizer else ''})" for t in transfers)
    keys = len(transfers[0].saved.keys) if transfers else 0
    frozen = transfers[0].saved.frozen if transfers else 0
    what = f"{keys} adapter weights (of {frozen} frozen tensors none is stored)" if frozen else f"{keys} weights"
    more = "".join(f"; {remark}" for remark in dict.fromkeys(one for t in transfers for one in _remarks(t)))
    return passed(f"{what} bit-equal after {ways}{more}").answer(QUESTION, figures)


def _remarks(t: Transfer) -> list[str]:
    said, left_out = [*remarks(t), *words_on_scales(t.scales)], some([*t.saved.left_out, *t.loaded.left_out])
    if t.with_optimizer and narrowed(t):
        said.append(f"{len(narrowed(t))} optimizer tensors arrive in their parameter's dtype, as load_state_dict casts")
    if t.loaded.unchecked:
        said.append(f"whether loading renews FP8 copies of weights was not checked: {t.loaded.unchecked}")
    return [*said, *([f"left out: {left_out}"] if left_out else [])]


def _refused(t: Transfer) -> Finding | None:
    if not t.loaded.refused:
        return None
    expected = "load_state_dict() takes the other arm's state dict: the target's own keys, without scaling state"
    return tell(WORDS, K.LOAD_REFUSED, expected, t.loaded.refused, source=t.arms[0], target=t.arms[1])


def _stored_in_fp8(t: Transfer) -> Finding | None:
    found = any("F8" in dtype or "float8" in dtype for dtype in t.saved.on_disk)
    return stored_in_fp8(f"{dict(t.saved.on_disk)}") if found else None


def _untied(t: Transfer) -> Finding | None:
    for name, other in {**t.saved.untied, **t.loaded.untied}.items():
        if name in t.loaded.missing or name not in t.loaded.digests:
            seen = f"{name} has values of its own in FP8, and no place beside {other} in BF16"
            return tell(WORDS, K.UNTIED, f"{name} to stay one with {other}", seen)
    return None


def _keys(t: Transfer) -> Finding | None:
    for code, wrong in (
        (K.WEIGHTS_MISSING, t.loaded.missing),
        (K.KEYS_WITHOUT_A_HOME, t.loaded.unexpected),
        (K.OTHER_SHAPE, t.loaded.wrong_shape),
    ):
        if wrong:
            return tell(WORDS, code, f"all {len(t.saved.keys)} weights, each with one home", some(list(wrong)))
    return None


def _weights(t: Transfer) -> Finding | None:
    changed = changed_weights(t)
    if not changed:
        return None
    untouched = [key for key in changed if key in set(t.loaded.untouched)]
    code, seen = K.WEIGHTS_CHANGED, f"{len(changed)} differ: {some(changed)}"
    if len(untouched) == len(t.saved.digests):
        code, seen = K.NOTHING_LOADED, f"all {len(untouched)} weights hold what they held before the load"
    return tell(WORDS, code, "bit-equal weights after loading", seen)


def _stale(t: Transfer) -> Finding | None:
    if not t.loaded.stale:
        return None
    load = "load_state_dict" if t.saved.own is None else "load()"
    seen = f"after an evaluation, {load} and another evaluation these layers still multiply by the old weights: "
    expected, seen = f"an evaluation after {load} multiplies by the loaded weights", seen + some(t.loaded.stale)
    return tell(WORDS, K.STALE_COPIES, expected, seen, count=len(t.loaded.stale))


def _optimizer(t: Transfer) -> Finding | None:
    return optimizer_lost(t) if t.with_optimizer else None


def _logits(t: Transfer) -> Finding | None:
    if t.logit_distance <= t.logit_limit:  # false of NaN
        return None
    if math.isnan(t.logit_distance):
        expected = "finite outputs of the arm that saved, after a few steps of training"
        seen = f"values that are not finite, in the source of {t.direction}; all weights arrived bit-equal"
        return tell(WORDS, K.OUTPUTS_NOT_FINITE, expected, seen, Verdict.INVALID)
    if not t.same_input:
        return other_data(f"other input for the same batch; outputs {t.logit_distance:.3f} apart (relative L2)")
    expected = f"logits within {t.logit_limit:.3f} of the source's (relative L2)"
    words = WITH_SCALES if t.keeps_scales else WORDS
    return tell(words, K.COMPUTES_OTHERWISE, expected, f"{t.logit_distance:.3f}")


_RULES = (
    *(_stored_in_fp8, _untied, _keys, _refused),
    *(_weights, _stale, _optimizer, _logits, check_resumed, check_scales),
)
_OWN_RULES = (check_own, _stale, _logits, check_resumed)
"""In this order: the first that finds something is the verdict."""
