"""Can I switch back? Checkpoints carried both ways between the arms. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Apart, Transfer
from pytest_fp8.questions.checkpoints.lost import COMPUTES, differing, first_lost, narrowed
from pytest_fp8.questions.checkpoints.words import OWN
from pytest_fp8.questions.findings import some, tell
from pytest_fp8.verdicts import Decision, Figures, Finding, passed

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
        found = first_lost(transfer)
        if found is not None:
            left = _left_behind(transfers) if found.code in [row.code for row in COMPUTES] else None
            where = f"{transfer.direction} through {transfer.store}: {found.headline}"
            said = replace(left, seen=f"{left.seen}; {where}") if left else replace(found, headline=where)
            return said.answer(QUESTION, figures)
    ways = ", ".join(f"{t.direction} ({t.store}{', resumed' if t.with_optimizer else ''})" for t in transfers)
    keys = len(transfers[0].saved.keys) if transfers else 0
    frozen = transfers[0].saved.frozen if transfers else 0
    what = f"{keys} adapter weights (of {frozen} frozen tensors none is stored)" if frozen else f"{keys} weights"
    more = "".join(f"; {remark}" for remark in dict.fromkeys(one for t in transfers for one in _remarks(t)))
    return passed(f"{what} bit-equal after {ways}{more}").answer(QUESTION, figures)


def _remarks(t: Transfer) -> list[str]:
    """What was lost and fails nothing, each in a few words."""
    said, left_out = _of_own(t), some([*t.saved.left_out, *t.loaded.left_out])
    if t.with_optimizer and narrowed(t):
        said.append(f"{len(narrowed(t))} optimizer tensors arrive in their parameter's dtype, as load_state_dict casts")
    if t.loaded.unchecked:
        said.append(f"whether loading renews FP8 copies of weights was not checked: {t.loaded.unchecked}")
    return [*said, *([f"left out: {left_out}"] if left_out else [])]


def _of_own(t: Transfer) -> list[str]:
    """The same of the user's own functions."""
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
    buffers = differing(saved.kept.buffers, loaded.kept.buffers, 0.0)
    if buffers:
        said.append(f"buffers declared as not persistent are not carried: {some(list(buffers))}")
    return said


def _left_behind(transfers: Sequence[Transfer]) -> Finding | None:
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
