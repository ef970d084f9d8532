"""Two ledgers of healthy arms, by hand, and changes to the FP8 arm's."""

from __future__ import annotations

from dataclasses import replace

from helpers.evidence import UPDATES, WEIGHT, arm_ledger, sketch
from pytest_fp8.questions.layers.products import Product
from pytest_fp8.questions.ledger.evidence import Draw, Entered, OwnedProduct, TwoLedgers

HEALTHY = arm_ledger()
IN_FLOAT32 = {"mul float32": 2, "rsqrt float32": 1}
GIVEN = HEALTHY.batch[0]
DRAW = Draw("forward", "norm", "native_dropout", [48, 64], "s1")


def ledgers(backend="torchao", reference=None, **changes):
    return TwoLedgers(reference or HEALTHY, arm_ledger(**changes), backend)


def entered(*tensors, phase="forward"):
    return [Entered("", phase, True, True, list(tensors))]


def without(name):
    return [call for call in HEALTHY.calls if call.module != name]


def call(name, **changes):
    return [replace(c, **changes) if c.module == name else c for c in HEALTHY.calls]


def weights(**changes):
    return {**HEALTHY.after, "q.weight": replace(WEIGHT, **changes)}


def optimizer(**changes):
    return replace(HEALTHY.optimizer, **changes)


def updates(*moved, **changes):
    """Those of arms whose ``q.weight`` moved otherwise."""
    digests, sketches = dict(UPDATES.digests), dict(UPDATES.sketches)
    digests["q.weight"], sketches["q.weight"] = "2", sketch(*moved)
    return replace(UPDATES, digests=digests, sketches=sketches, **changes)


def head(kind="bfloat16", rows=48):
    return [OwnedProduct("lm_head", Product("forward", 256, (rows, 512), kind, "mm"))]
