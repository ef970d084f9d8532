"""Carries checkpoints between the two live arms of a pair, and gathers what both sides held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from pytest_fp8.case import OWN, OWN_STORE, Case
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.arms import Arm, PairArms
from pytest_fp8.questions.checkpoints.check import logit_limit
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, Apart, Loaded, Resumed, Saved, Transfer
from pytest_fp8.questions.checkpoints.resuming import astray
from pytest_fp8.recipes import backend_type

DCP = "dcp"
STEPS = 4
"""Training steps before a checkpoint is written, and after it was loaded."""
SEED = 7
DRAWS = 8
"""Ways in which weights are moved: docs/limits.md."""


@dataclass(frozen=True)
class Output:
    """An arm's logits on held-out rows, flat, and a fingerprint of what entered the model."""

    values: NDArray[np.float32]
    given: int


@dataclass(frozen=True)
class Source:
    """An arm that has trained and saved: what its checkpoints must carry."""

    folder: Path
    """It has a folder per store."""
    saved: Mapping[str, Saved]
    """By store."""
    logits: Output
    came: Sequence[float]
    """Losses of the steps before it saved."""
    went_on: Resumed
    """The steps that it went on to train; :data:`NOT_RESUMED` where the case does not resume."""


def transfers_of(pair: PairArms) -> list[Transfer]:
    """Asked once. Raises ``ArmError``."""
    return pair.once(f"checkpoints {_asked(pair)}", lambda: _carry_both_ways(pair))


def _carry_both_ways(pair: PairArms) -> list[Transfer]:
    """Both directions through every store of the case. The FP8 arm's files are deleted afterwards; the reference's are
    kept for the other cases that share it.

    What the reference answers alone comes first, then all of the FP8 arm: arms that take turns are built once more for
    the last direction, and no more.
    """
    reference_start, back = reference_source(pair)
    stores = _stores(pair)
    start = _logits_at_start(pair.fp8), reference_start
    with pair.temporary_folder() as folder:
        forth = _source(pair, pair.fp8, folder, stores)
        apart = Apart(
            relative_distance(*(each.values for each in start)),
            start[1].values.size,
            mean(forth.came) - mean(back.came),
        )
        to_fp8 = [_carry(pair, ("bf16", "fp8"), store, back, pair.fp8, apart) for store in stores]
        # It may have answered other cases since: buffers that are not saved are drawn again with this seed.
        pair.bf16.request("curve", seed=SEED, steps=1)
        to_bf16 = [_carry(pair, ("fp8", "bf16"), store, forth, pair.bf16, apart) for store in stores]
        between = _carry_between_ranks(pair, forth, apart) if _changes_ranks(pair.case) else []
    return with_moved_reference(pair, to_bf16 + between + to_fp8)


def reference_source(pair: PairArms) -> tuple[Output, Source]:
    """The reference's logits before it trains, and the reference trained and saved; asked once for all cases that share
    it. Raises ``ArmError``."""
    start = pair.shared("logits at start", lambda: _logits_at_start(pair.bf16))
    stores = _stores(pair)
    what = f"checkpoint {_asked(pair)}"
    return start, pair.shared(what, lambda: _source(pair, pair.bf16, pair.folder(what), stores))


def _changes_ranks(case: Case) -> bool:
    """Whether checkpoints are also carried between this case's ranks and one GPU. Not where it does not resume: such a
    case may fit several GPUs alone. Not through a workload's functions, which may ask for the rank, and not through
    Accelerate and ZeRO-3, whose weights or optimizer have another type on one GPU."""
    through_accelerate = backend_type(case.backend).through_accelerate
    alike = case.model != OWN and not through_accelerate and case.parallel != "zero3"
    return case.gpus > 1 and case.resume and DCP in case.checkpoint_formats and alike


def _carry_between_ranks(pair: PairArms, forth: Source, start: Apart) -> list[Transfer]:
    """What the FP8 arm's ranks saved, into the reference on one GPU; and what that saves then, into the FP8 arm."""
    several, one = f" on {pair.case.gpus} ranks", " on one"
    with pair.on_one_gpu() as alone, pair.temporary_folder() as folder:
        there = replace(_carry(pair, ("fp8", "bf16"), DCP, forth, alone, start), ranks=(several, one))
        back = _source(pair, alone, folder, (DCP,))
        home = replace(_carry(pair, ("bf16", "fp8"), DCP, back, pair.fp8, start), ranks=(one, several))
    # Ranks are given parts of each batch, so fingerprints of what was given are others.
    return [replace(t, resumed=replace(t.resumed, data=t.source.data, inputs=t.source.inputs)) for t in (there, home)]


def with_moved_reference(pair: PairArms, transfers: list[Transfer]) -> list[Transfer]:
    """The transfers with what moved weights do to the trained reference, where limits without it do not hold. Most
    models' do, and their reference is not asked."""
    far = any(t.loaded.loaded and not t.logit_distance <= t.logit_limit for t in transfers)
    elsewhere = any(t.loaded.loaded and astray(t) for t in transfers)
    if not (far or elsewhere):
        return transfers

    def logits() -> list[float]:
        pair.bf16.request("curve", seed=SEED, steps=STEPS)
        return list(pair.bf16.request("moved_outputs", seed=SEED, draws=DRAWS))

    def losses() -> list[float]:
        return list(pair.bf16.request("moved_resumes", seed=SEED, first_step=STEPS, steps=STEPS, draws=DRAWS))

    start = replace(
        transfers[0].start,
        moved_logits=pair.shared("moved logits", logits) if far else (),
        moved_losses=pair.shared("moved losses", losses) if elsewhere else (),
    )
    return [replace(t, start=start, logit_limit=logit_limit(start)) for t in transfers]


def _stores(pair: PairArms) -> tuple[str, ...]:
    """The case's, and the user's own where the workload has one."""
    asked = pair.case.checkpoint_formats
    return asked if OWN_STORE in asked or not pair.bf16.facts.get("own_checkpoints") else (*asked, OWN_STORE)


def _asked(pair: PairArms) -> str:
    """What is carried, for the names of answers and folders: cases with the same arms may ask for different things."""
    return f"{pair.case.resume} {pair.case.checkpoint_formats}"


def _logits_at_start(arm: Arm) -> Output:
    """On weights that are one and the same in both arms."""
    arm.request("restart", seed=SEED)
    return _logits(arm)


def _source(pair: PairArms, arm: Arm, folder: Path, stores: Sequence[str]) -> Source:
    came = arm.request("curve", seed=SEED, steps=STEPS)["losses"]
    saved = {
        store: from_plain(
            Saved,
            arm.request("save", folder=str(folder / store), store=store, optimizer=_with_optimizer(pair, store)),
        )
        for store in stores
    }
    logits = _logits(arm)
    return Source(folder, saved, logits, came, _resumed(arm) if pair.case.resume else NOT_RESUMED)


def _carry(pair: PairArms, arms: tuple[str, str], store: str, source: Source, target: Arm, start: Apart) -> Transfer:
    optimizer = _with_optimizer(pair, store)
    answer = target.request("load", folder=str(source.folder / store), store=store, optimizer=optimizer)
    loaded = from_plain(Loaded, answer)
    apart, same, resumed = math.nan, True, NOT_RESUMED
    if loaded.loaded:
        output = _logits(target)
        apart, same = relative_distance(output.values, source.logits.values), output.given == source.logits.given
        if optimizer:
            resumed = _resumed(target)
    return Transfer(
        arms=arms,
        store=store,
        saved=source.saved[store],
        loaded=loaded,
        logit_distance=apart,
        logit_limit=logit_limit(start),
        start=start,
        same_input=same,
        with_optimizer=optimizer,
        source=source.went_on,
        resumed=resumed,
    )


def _with_optimizer(pair: PairArms, store: str) -> bool:
    """Weights travel alone through safetensors, as they are published; the training state through DCP and through the
    user's own functions. Through these alone where the reference's optimizer steps parameters that are none of the
    model's: only the user knows what they are."""
    facts = pair.bf16.facts
    own_alone = facts.get("own_checkpoints") and facts.get("foreign_parameters")
    return pair.case.resume and (store == OWN_STORE or (store == DCP and not own_alone))


def _resumed(arm: Arm) -> Resumed:
    return from_plain(Resumed, arm.request("resume", seed=SEED, first_step=STEPS, steps=STEPS))


def _logits(arm: Arm) -> Output:
    """The arm's logits on held-out rows, flat, and a fingerprint of the model's input."""
    answer = arm.request("logits", seed=SEED)
    return Output(np.frombuffer(answer, dtype=np.float32, offset=4), int.from_bytes(answer[:4], "little"))


def relative_distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """||a - b|| / ||b||. Infinite where the sizes differ, or ``a`` alone is not finite; NaN where ``b`` is not."""
    if not np.isfinite(b).all():
        return math.nan
    if a.shape != b.shape or not np.isfinite(a).all():
        return math.inf
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))
