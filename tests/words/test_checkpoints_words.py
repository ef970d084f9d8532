"""Every sentence of the checkpoints question, from evidence written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.evidence import trained, transfer
from pytest_fp8.codes import K
from pytest_fp8.questions.checkpoints.check import check_checkpoints

KEPT = {
    "schedule": {"last_epoch": 4},
    "groups": {"group 0: lr": 3e-4},
    "attributes": {"ema[0]": "tensor 8x8 0001"},
}


def own(saved=None, loaded=None, **kept):
    """A checkpoint through the user's own functions. ``kept``: what the target has after loading."""
    after = {**KEPT, **kept}
    return transfer(
        store="own",
        saved_changes={"kept": KEPT, **(saved or {})},
        loaded_changes={"kept": after, **(loaded or {})},
        source=trained([2.0, 1.9], **KEPT),
        resumed=trained([2.0, 1.9], **after),
    )


def untouched(*names):
    digests = {name: 8 if name in names else number for name, number in (("w", 1), ("v", 2))}
    return own(loaded={"digests": digests, "untouched": list(names)})


def stores(**changes):
    return transfer(loaded_changes=changes)


def left_in_eval():
    t = replace(own(), logit_distance=0.4)
    return [replace(t, saved=replace(t.saved, flags=["model.training = False"])), replace(t, arms=("bf16", "fp8"))]


FOUND = {
    K.STORED_IN_FP8: transfer(saved_changes={"on_disk": {"F8_E4M3": 2}}),
    K.UNTIED: stores(untied={"head": "emb"}),
    K.WEIGHTS_MISSING: untouched("w"),
    K.WEIGHTS_CHANGED: stores(digests={"w": 1, "v": 3}),
    K.CHANGED_BY_SAVING: own(saved={"changed_by_saving": ["w"]}),
    K.STRAY_PARAMETERS: own(loaded={"strays": True}),
    K.STALE_COPIES: stores(stale=["q"]),
    K.OPTIMIZER_LOST: stores(optimizer_digests={}),
    K.STATE_LOST: own(schedule={"last_epoch": 0}),
    K.SOURCE_NOT_FINITE: transfer(logit_distance=math.nan),
    K.DATA_NOT_CARRIED: transfer(resumed=trained([2.0, 1.9], data=2)),
    K.COMPUTES_OTHERWISE: transfer(logit_distance=1.4),
    K.STATE_LEFT_BEHIND: left_in_eval(),
    K.DOES_NOT_GO_ON: transfer(source=trained([2.0, 1.9]), resumed=trained([3.0, 2.9])),
    K.LOAD_REFUSED: stores(refused="the model's load_state_dict(): RuntimeError: no"),
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
