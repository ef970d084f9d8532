"""Every sentence of the checkpoints question, from evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import trained, transfer
from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.checkpoints.evidence import NOT_RESUMED, OwnLoaded, OwnSaved

KEPT = replace(
    NOT_RESUMED.kept, schedule={"last_epoch": 4}, groups={"group 0: lr": 3e-4}, attributes={"ema[0]": "tensor 8x8 0001"}
)


def own(kept=None, loaded=None, **saved):
    """A checkpoint through the user's own functions. ``kept``: what the target has after loading."""
    source = OwnSaved(KEPT, changed_by_saving=[], buffers=["v"], casts={"float16": {"w": 7}}, drawn=[])
    after = replace(KEPT, **(kept or {}))
    return transfer(
        store="own",
        saved_changes={"own": replace(source, **saved)},
        loaded_changes={"own": OwnLoaded(kept=after), **(loaded or {})},
        source=replace(trained([2.0, 1.9]), kept=KEPT),
        resumed=replace(trained([2.0, 1.9]), kept=after),
    )


def untouched(*names):
    digests = {name: 8 if name in names else number for name, number in (("w", 1), ("v", 2))}
    return own(loaded={"digests": digests, "own": OwnLoaded(KEPT), "untouched": list(names)})


def stores(**changes):
    return transfer(loaded_changes=changes)


def left_in_eval():
    t = replace(own(), logit_distance=0.4)
    left = replace(t.saved.own, flags={"put into eval mode": ["the model"]})
    back = replace(t, arms=("bf16", "fp8"))
    return [replace(t, saved=replace(t.saved, own=left)), back]


FOUND = {
    K.STORED_IN_FP8: transfer(saved_changes={"on_disk": {"F8_E4M3": 2}}),
    K.UNTIED: transfer(loaded_changes={"untied": {"head": "emb"}, "missing": ["head"]}),
    K.WEIGHTS_MISSING: stores(missing=["w"]),
    K.KEYS_WITHOUT_A_HOME: stores(unexpected=["module.w"]),
    K.OTHER_SHAPE: stores(wrong_shape=["w"]),
    K.NOTHING_LOADED: untouched("w", "v"),
    K.WEIGHTS_CHANGED: stores(digests={"w": 1, "v": 3}),
    K.CAST_ON_THE_WAY: own(loaded={"digests": {"w": 7, "v": 2}}),
    K.BUFFERS_NOT_CARRIED: untouched("v"),
    K.CHANGED_BY_SAVING: own(changed_by_saving=["w"]),
    K.STRAY_PARAMETERS: own(loaded={"own": OwnLoaded(KEPT, strays=True)}),
    K.STALE_COPIES: stores(stale=["q"]),
    K.OPTIMIZER_LOST: stores(optimizer_digests={}),
    K.SCHEDULE_LOST: own(kept={"schedule": {"last_epoch": 0}}),
    K.GROUPS_LOST: own(kept={"groups": {"group 0: lr": 1e-3}}),
    K.ATTRIBUTES_LOST: own(kept={"attributes": {}}),
    K.OUTPUTS_NOT_FINITE: transfer(logit_distance=math.nan),
    K.DATA_NOT_CARRIED: transfer(resumed=trained([2.0, 1.9], data=2)),
    K.COMPUTES_OTHERWISE: transfer(logit_distance=1.4),
    K.STATE_LEFT_BEHIND: left_in_eval(),
    K.SOURCE_DIVERGED: transfer(source=trained([2.0, math.nan]), resumed=trained([2.0, 1.8])),
    K.DOES_NOT_GO_ON: transfer(source=trained([2.0, 1.9]), resumed=trained([3.0, 2.9])),
    K.LOAD_REFUSED: stores(loaded=False, refused="the model's load_state_dict(): RuntimeError: no"),
}
"""Code -> evidence that it is found in."""


@pytest.mark.parametrize("code", FOUND, ids=lambda code: code.slug)
def test_words(code, snapshot):
    evidence = FOUND[code]
    decision = check_checkpoints(evidence if isinstance(evidence, list) else [evidence])
    assert decision.code is code, decision.message
    assert decision.message == snapshot


def test_every_code_has_its_words_here():
    assert set(FOUND) == set(K)
