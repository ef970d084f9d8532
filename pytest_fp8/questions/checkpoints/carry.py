"""Carries checkpoints between the two live arms of a pair, and gathers what both sides held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.case import OWN_STORE, Case
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking, TwoArms
from pytest_fp8.questions.checkpoints.check import is_astray, is_far
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, Apart, Loaded, Resumed, Saved, Transfer

DCP = "dcp"
STEPS = 4
"""Training steps before a checkpoint is written, and after it was loaded."""
SEED = 1
"""One of the loss question's, whose weights a workload's arm keeps, but not that of its build."""
DRAWS = 8
"""Ways in which weights are moved: docs/limits.md."""


Output = tuple[NDArray[np.float32], int]
"""An arm's logits on held-out rows, flat, and a fingerprint of what entered the model."""


@dataclass(frozen=True)
class Source:
    """An arm that has trained and saved: what its checkpoints must carry."""

    folder: Path
    """It has a folder per store."""
    saved: Mapping[str, Saved]
    """By store."""
    start: Output
    """Its logits before it trained, on weights that are one and the same in both arms."""
    logits: Output
    came: Sequence[float]
    """Losses of the steps before it saved."""
    went_on: Resumed
    """The steps that it went on to train; :data:`NOT_RESUMED` where the case does not resume."""


def transfers_of(arms: TwoArms) -> Asking[list[Transfer]]:
    """Both directions through every store of the case. The FP8 arm's files are deleted afterwards; the reference's are
    kept for the other cases that share it."""
    return (yield from arms.kept(f"checkpoints {_asked(arms.case)}", lambda: _carry_both_ways(arms)))


def _carry_both_ways(arms: TwoArms) -> Asking[list[Transfer]]:
    """What the reference answers alone comes first, then all of the FP8 arm: arms that take turns are built once more
    for the last direction, and no more."""
    what = f"checkpoint {_asked(arms.case)}"
    back = yield from arms.kept(what, lambda: _source(arms, REFERENCE, arms.folder(what)), REFERENCE)
    with arms.temporary_folder() as folder:
        forth = yield from _source(arms, FP8, folder)
        (mine, _), (theirs, _) = forth.start, back.start
        apart = Apart(relative_distance(mine, theirs), theirs.size, mean(forth.came) - mean(back.came))
        transfers = []
        for names, source, target in ((("bf16", "fp8"), back, FP8), (("fp8", "bf16"), forth, REFERENCE)):
            for store in back.saved:
                transfers.append((yield from _carry(arms, names, store, source, target, apart)))
    # What FP8 saved is told first.
    return (yield from with_moved_reference(arms, sorted(transfers, key=lambda t: t.arms, reverse=True)))


def with_moved_reference(arms: TwoArms, transfers: list[Transfer]) -> Asking[list[Transfer]]:
    """The transfers with what moved weights do to the trained reference, where limits without it do not hold. Most
    models' do, and their reference is not asked."""
    far = any(not t.loaded.refused and is_far(t) for t in transfers)
    astray = any(not t.loaded.refused and is_astray(t) for t in transfers)
    start = transfers[0].start
    if far:
        start = replace(start, moved_logits=(yield from arms.kept("moved logits", _moved_logits, REFERENCE)))
    if astray:
        start = replace(start, moved_losses=(yield from _moved_losses()))
    return [replace(t, start=start) for t in transfers]


def _moved_logits() -> Asking[Sequence[float]]:
    """Of the reference, trained."""
    yield Ask(REFERENCE, "curve", fresh=True, seed=SEED, steps=STEPS)
    found: Sequence[float] = yield Ask(REFERENCE, "moved", fresh=True, of="outputs", seed=SEED, draws=DRAWS)
    return found


def _moved_losses() -> Asking[Sequence[float]]:
    """How far the mean of the reference's later losses moves where these steps have noise of FP8's size."""

    def run(**noise: Any) -> Ask:
        return Ask(REFERENCE, "curve", seed=SEED, steps=2 * STEPS, **noise)

    own, *noisy = yield run(), *(run(noise=draw, noise_from=STEPS) for draw in range(DRAWS))
    return [mean(curve["losses"][STEPS:]) - mean(own["losses"][STEPS:]) for curve in noisy]


def _stores(arms: TwoArms) -> tuple[str, ...]:
    """The case's, and the user's own where the workload has one."""
    asked = arms.case.checkpoint_formats
    return asked if OWN_STORE in asked or not arms.facts(REFERENCE).get("own_checkpoints") else (*asked, OWN_STORE)


def _asked(case: Case) -> str:
    """What is carried, for the names of answers and folders: cases with the same arms may ask for different things."""
    return f"{case.resume} {case.checkpoint_formats}"


def _source(arms: TwoArms, arm: str, folder: Path) -> Asking[Source]:
    """The arm's logits on weights that are one and the same in both arms; then it trains and saves."""
    # A user's build() may take long, so that both arms run it at once; afterwards both keep what it gave.
    both = arms.case.tokens is None and arm == REFERENCE and not arms.takes_turns
    yield tuple(Ask(each, "restart", fresh=True, seed=SEED) for each in ((FP8, arm) if both else (arm,)))
    start = yield from _logits(arm)
    curve = yield Ask(arm, "curve", fresh=True, seed=SEED, steps=STEPS)
    saved = {}
    for store in _stores(arms):
        optimizer = _with_optimizer(arms, store)
        to = str(folder / store)
        saved[store] = yield Ask(arm, "save", Saved, fresh=True, folder=to, store=store, optimizer=optimizer)
    logits = yield from _logits(arm)
    went_on = (yield from _resumed(arm)) if arms.case.resume else NOT_RESUMED
    return Source(folder, saved, start, logits, curve["losses"], went_on)


def _carry(
    arms: TwoArms, names: tuple[str, str], store: str, source: Source, target: str, start: Apart
) -> Asking[Transfer]:
    optimizer = _with_optimizer(arms, store)
    given = {"folder": str(source.folder / store), "store": store, "optimizer": optimizer, "seed": SEED}
    loaded = yield Ask(target, "load", Loaded, fresh=True, **given)
    apart, same, resumed = math.nan, True, NOT_RESUMED
    if not loaded.refused:
        (values, given_to_it), (wanted, given_before) = (yield from _logits(target)), source.logits
        apart, same = relative_distance(values, wanted), given_to_it == given_before
        if optimizer:
            resumed = yield from _resumed(target)
    return Transfer(
        arms=names,
        store=store,
        saved=source.saved[store],
        loaded=loaded,
        logit_distance=apart,
        start=start,
        same_input=same,
        with_optimizer=optimizer,
        source=source.went_on,
        resumed=resumed,
    )


def _with_optimizer(arms: TwoArms, store: str) -> bool:
    """Weights travel alone through safetensors, as they are published; the training state through DCP and through the
    user's own functions. Through these alone where the reference's optimizer steps parameters that are none of the
    model's: only the user knows what they are."""
    facts = arms.facts(REFERENCE)
    own_alone = facts.get("own_checkpoints") and facts.get("foreign_parameters")
    return arms.case.resume and (store == OWN_STORE or (store == DCP and not own_alone))


def _resumed(arm: str) -> Asking[Resumed]:
    found: Resumed = yield Ask(arm, "resume", Resumed, fresh=True, seed=SEED, first_step=STEPS, steps=STEPS)
    return found


def _logits(arm: str) -> Asking[Output]:
    answer = yield Ask(arm, "logits", fresh=True, seed=SEED)
    return np.frombuffer(answer, dtype=np.float32, offset=4), int.from_bytes(answer[:4], "little")


def relative_distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """||a - b|| / ||b||. Infinite where the sizes differ, or ``a`` alone is not finite; NaN where ``b`` is not."""
    if not np.isfinite(b).all():
        return math.nan
    if a.shape != b.shape or not np.isfinite(a).all():
        return math.inf
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
