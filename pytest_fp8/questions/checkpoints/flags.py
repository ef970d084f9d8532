"""Modes and trained parameters that the user's own ``save()`` or ``load()`` leaves changed in one arm alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.evidence import Transfer
from pytest_fp8.questions.findings import fail, some
from pytest_fp8.verdicts import Finding

Flags = Mapping[str, Sequence[str]]


def left_behind(transfers: Sequence[Transfer]) -> Finding | None:
    """Asked where a loaded model computes or trains otherwise. What both arms' calls leave is no cause of it."""
    own = {t.arms: t for t in transfers if t.saved.own and t.loaded.own}
    for which in ("save", "load"):
        arms: dict[str, Flags] = {}
        for (source, target), t in own.items():
            arm, said = (source, t.saved.own) if which == "save" else (target, t.loaded.own)
            arms[arm] = said.flags if said is not None else {}
        alone = [arm for arm, flags in arms.items() if flags and any(flags != other for other in arms.values())]
        if alone:
            return _left(which, alone[0], arms[alone[0]])
    return None


def _left(which: str, arm: str, flags: Flags) -> Finding:
    seen = "; ".join(f"{words}: {some(list(names))}" for words, names in flags.items())
    return fail(
        K.STATE_LEFT_BEHIND,
        f"{which}() leaves the {arm} model in another state",
        expected=f"modes of modules and trained parameters after {which}() as before it, as in the other arm",
        seen=seen,
        cause=f"{which}() calls model.eval(), model.train() or requires_grad_() and does not take it back: the model "
        "then computes with other dropout, or trains other weights",
        next_step=f"set back at the end of {which}() what it changed, or do it on a copy of the model",
    )
