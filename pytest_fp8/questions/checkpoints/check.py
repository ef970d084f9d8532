"""Can I switch back? Checkpoints carried both ways between the arms. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer
from pytest_fp8.questions.checkpoints.flags import left_behind
from pytest_fp8.questions.checkpoints.own import check_own, narrowed, optimizer_lost, remarks, stored_in_fp8
from pytest_fp8.questions.checkpoints.resuming import check_resumed, other_data
from pytest_fp8.questions.checkpoints.scales import check_scales, words_on_scales
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.verdicts import Decision, Figures, Finding, Verdict, passed

QUESTION = "checkpoints"
LOGITS = (0.05, 1.0)
"""Bounds of the limit on the logits' relative distance: at least 5 %, and below that of unrelated weights (1.4).
Seen on an H200: 0.56 between the precisions of one and the same 8B weights, close to their random start."""


TRAINED = 4.0
"""Factor on the distance at the start."""
OF_MOVED = 2.0
"""Factor on the largest distance that moved weights make. Seen on emulated FP8, 80 pairs of four workloads that small
changes send another way (experts, an interaction of embeddings, a line search): at most 1.05 times it."""
FEW = 64
"""Below so many values the output is a loss, or a few of them, and no logits: one number says little of a distance."""
OF_FEW = 0.25
"""The least limit for these. Seen on emulated FP8, of a model that gives its own loss, a small difference of cosines:
0.05 to 0.08 in 48 transfers (three recipes, four seeds), where the precisions differ by 0.03 at the start."""


def logit_limit(start: Apart) -> float:
    """Four times the distance that the two precisions show on one and the same weights, within :data:`LOGITS`.

    A few steps of training move it. Seen on emulated FP8 over 101 sound workloads: up to 2.5 times. Where that is not
    enough, twice what moved weights do to the trained model: a router that is undecided after training need not have
    been so at the start.
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
                direction = "fp8 -> fp8" if rule is _scaling_state else transfer.direction
                where = f"{direction} through {transfer.store}: {found.headline}"
                said = replace(left, seen=f"{left.seen}; {where}") if left else replace(found, headline=where)
                return said.answer(QUESTION, figures)
    ways = ", ".join(f"{t.direction} ({t.store}{', resumed' if t.with_optimizer else ''})" for t in transfers)
    keys = len(transfers[0].saved.keys) if transfers else 0
    frozen = transfers[0].saved.frozen if transfers else 0
    what = f"{keys} adapter weights (of {frozen} frozen tensors none is stored)" if frozen else f"{keys} weights"
    more = "".join(f"; {remark}" for remark in dict.fromkeys(one for t in transfers for one in _remarks(t)))
    return passed(f"{what} bit-equal after {ways}{more}").answer(QUESTION, figures)


def _scaling_state(t: Transfer) -> Finding | None:
    return check_scales(t.scales)


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
    source, target = t.arms
    return fail(
        K.LOAD_REFUSED,
        f"the {target} arm refuses the checkpoint of {source}",
        expected="load_state_dict() takes the other arm's state dict: the target's own keys, without scaling state",
        seen=t.loaded.refused,
        cause="load_state_dict(), or a hook of it, raises",
        next_step="give the state dict of the one model to load_state_dict() of the other, by hand",
    )


def _stored_in_fp8(t: Transfer) -> Finding | None:
    if not any("F8" in dtype or "float8" in dtype for dtype in t.saved.on_disk):
        return None
    return stored_in_fp8(f"{dict(t.saved.on_disk)}")


def _untied(t: Transfer) -> Finding | None:
    untied = {**t.saved.untied, **t.loaded.untied}
    alone = [name for name in untied if name in t.loaded.missing or name not in t.loaded.digests]
    if not alone:
        return None
    name, other = alone[0], untied[alone[0]]
    return fail(
        K.UNTIED,
        "a weight that was tied is one of its own after the conversion",
        expected=f"{name} to stay one with {other}",
        seen=f"{name} has values of its own in FP8, and no place beside {other} in BF16",
        cause="the conversion copied weights into new layers: the model was untied",
        next_step="tie again after the conversion: model.tie_weights()",
    )


def _keys(t: Transfer) -> Finding | None:
    for code, wrong, headline, cause in (
        (
            K.WEIGHTS_MISSING,
            t.loaded.missing,
            "weights are missing from the checkpoint",
            "keys were renamed by a wrapper, or not saved",
        ),
        (
            K.KEYS_WITHOUT_A_HOME,
            t.loaded.unexpected,
            "the checkpoint has keys with no home",
            "a prefix, or scaling state that no weight of the target takes",
        ),
        (K.OTHER_SHAPE, t.loaded.wrong_shape, "weights have another shape", "fused or split layers"),
    ):
        if wrong:
            return fail(
                code,
                headline,
                expected=f"all {len(t.saved.keys)} weights, each with one home",
                seen=some(list(wrong)),
                cause=cause,
                next_step="compare the keys of both arms' state dicts",
            )
    return None


def _weights(t: Transfer) -> Finding | None:
    changed = [key for key, digest in t.saved.digests.items() if t.loaded.digests.get(key) != digest]
    if not changed:
        return None
    if t.saved.wrapped:
        return fail(
            K.NOTHING_LOADED,
            "the checkpoint was loaded into nothing",
            expected="bit-equal weights after loading",
            seen=f"{len(changed)} weights are not the stored ones; on disk: {some(list(t.saved.wrapped))}",
            cause="keys carry a wrapper's prefix (_orig_mod., module.) and a load that is not strict drops them",
            next_step="load with strict=True, and save the module inside the wrapper",
        )
    return fail(
        K.WEIGHTS_CHANGED,
        "weights changed on the way",
        expected="bit-equal weights after loading",
        seen=f"{len(changed)} differ: {some(changed)}",
        cause="a cast on the way, or a load that silently did nothing",
        next_step="load with strict=True",
    )


def _stale(t: Transfer) -> Finding | None:
    if not t.loaded.stale:
        return None
    load = "load_state_dict" if t.saved.own is None else "load()"
    return fail(
        K.STALE_COPIES,
        f"{len(t.loaded.stale)} FP8 layer(s) compute with weights of before the load",
        expected=f"an evaluation after {load} multiplies by the loaded weights",
        seen=f"after an evaluation, {load} and another evaluation these layers still multiply by the old weights: "
        f"{some(t.loaded.stale)}",
        cause="the layer computes with weights of before the load: a cached FP8 copy of the weight that loading does "
        "not renew",
        next_step="drop the copy when a state dict is loaded (register_load_state_dict_post_hook), or keep "
        "weight._version with it and make it again where that differs",
    )


def _optimizer(t: Transfer) -> Finding | None:
    return optimizer_lost(t) if t.with_optimizer else None


def _logits(t: Transfer) -> Finding | None:
    if t.logit_distance <= t.logit_limit:  # false of NaN
        return None
    if math.isnan(t.logit_distance):
        return Finding(
            K.OUTPUTS_NOT_FINITE,
            Verdict.INVALID,
            headline="the trained model's outputs are not finite, so nothing tells whether it arrived",
            expected="finite outputs of the arm that saved, after a few steps of training",
            seen=f"values that are not finite, in the source of {t.direction}; all weights arrived bit-equal",
            cause="its training diverged before it saved",
            next_step="ask assert_loss(), which names the arm and the step",
        )
    if not t.same_input:
        return other_data(f"other input for the same batch; outputs {t.logit_distance:.3f} apart (relative L2)")
    return fail(
        K.COMPUTES_OTHERWISE,
        "the loaded model computes something else",
        expected=f"logits within {t.logit_limit:.3f} of the source's (relative L2)",
        seen=f"{t.logit_distance:.3f}",
        cause="stale scaling state, or buffers that were not carried"
        if t.keeps_scales
        else "the arms make something else of the same weights: a factor, a flag or a buffer that no checkpoint "
        "carries (neither arm keeps scaling state)",
        next_step="reset scaling state after loading"
        if t.keeps_scales
        else "give both arms' models the same weights, and compare their outputs layer by layer",
    )


_RULES = (
    *(_stored_in_fp8, _untied, _keys, _refused),
    *(_weights, _stale, _optimizer, _logits, check_resumed, _scaling_state),
)
_OWN_RULES = (check_own, _stale, _logits, check_resumed)
"""In this order: the first that finds something is the verdict."""
