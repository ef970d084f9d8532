"""Two ledgers of healthy arms, by hand, and changes to the FP8 arm's."""

from __future__ import annotations

from dataclasses import replace

from helpers.evidence import UPDATES, WEIGHT, arm_ledger, sketch
from pytest_fp8.codes import D, L
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


MEMBERS = HEALTHY.optimizer.members
AGAIN = replace(HEALTHY.calls[2], phase="recompute", outermost=True)
TF32 = "torch.backends.cuda.matmul.allow_tf32"


DIFFERENCES = [  # changes of the FP8 arm, code, what the message names
    ({"after": weights(digest="2")}, L.WEIGHT_CHANGED, "q.weight"),
    ({"after": weights(dtype="float32")}, L.WEIGHT_CAST, "float32"),
    ({"after": weights(shape=[64, 80])}, L.WEIGHT_RESHAPED, "64x80"),
    ({"after": weights(trained=False)}, L.FREEZES_TRAINED, "q.weight"),
    ({"after": {n: w for n, w in HEALTHY.after.items() if n != "q.weight"}}, L.WEIGHT_GONE, "q.weight"),
    ({"optimizer": optimizer(members={"q.weight": 0, "up.weight": 0})}, L.NOT_IN_OPTIMIZER, "lm_head.weight"),
    ({"optimizer": optimizer(members={**MEMBERS, "more": 0})}, D.OTHER_WEIGHTS_TRAINED, "more"),
    ({"calls": without("up")}, L.PASSED_BY, "up"),
    ({"gradients": ["lm_head.weight", "q.weight"]}, L.NO_GRADIENT, "up.weight"),
    ({"before": weights(digest="2"), "after": weights(digest="2")}, D.OTHER_MODEL, "q.weight"),
    ({"entered": entered(replace(GIVEN, shape=[24, 64]))}, D.OTHER_WORK, "24x64"),
    ({"entered": entered(replace(GIVEN, dtype="float32"))}, D.OTHER_WORK, "float32"),
    ({"entered": [*HEALTHY.entered] * 2}, D.OTHER_WORK, "2: the model"),
    ({"entered": [replace(HEALTHY.entered[0], gradients=False)]}, D.OTHER_MODE, "off"),
    ({"calls": call("norm", training=False)}, D.OTHER_MODE, "eval"),
    ({"calls": call("norm", shape=[24, 64])}, D.OTHER_WORK, "24x64"),
    ({"calls": without("norm")}, D.OTHER_WORK, "none of them"),
    ({"backward": 2}, D.OTHER_PASSES, "2"),
    ({"stepped": 2}, D.OTHER_PASSES, "2"),
    ({"products": head("float32")}, D.OTHER_PRECISION, "float32"),
    ({"products": head(rows=24)}, D.OTHER_WORK, "24x256x512"),
    ({"operators": {**HEALTHY.operators, "norm": {}}}, D.OTHER_WORK, "none of them"),
    ({"operators": {**HEALTHY.operators, "norm": IN_FLOAT32}}, D.OTHER_PRECISION, "norm"),
    ({"waits": {"norm": {"forward": 1}}}, D.OTHER_WAITS, "norm"),
    ({"norm_kept": 0.2}, D.OTHER_CLIPPING, "0.2"),
    ({"loss_dtype": "bfloat16"}, D.OTHER_PRECISION, "bfloat16"),
    ({"random": "other"}, D.OTHER_RANDOM_NUMBERS, "state other"),
    ({"random": "other", "draws": [DRAW]}, D.OTHER_RANDOM_NUMBERS, "native_dropout of 48x64 by norm"),
    ({"switches": {**HEALTHY.switches, TF32: "True"}}, D.OTHER_SWITCH, "True"),
    ({"switches": {**HEALTHY.switches, "autocast on cuda": "torch.bfloat16"}}, D.OTHER_SWITCH, "bfloat16"),
    ({"switches_after": {}}, D.OTHER_SWITCH, "none"),
    ({"optimizer": optimizer(groups=[{"lr": "0.002"}])}, D.OTHER_OPTIMIZER, "0.002"),
    ({"optimizer": optimizer(kind="SGD")}, D.OTHER_OPTIMIZER, "SGD"),
    ({"optimizer": optimizer(schedule={"class": "StepLR"})}, D.OTHER_OPTIMIZER, "StepLR"),
    ({"updates": updates(1.2, -2.0, 2.0)}, D.OTHER_UPDATES, "q.weight"),
    ({"entered": entered(replace(GIVEN, digest="else"))}, D.OTHER_INPUTS, "other values"),
    ({"batch": [replace(GIVEN, digest="else")]}, D.OTHER_DATA, "other values"),
    ({"recomputed_otherwise": ["q"]}, D.RECOMPUTED_OTHERWISE, "q"),
    ({"calls": [*HEALTHY.calls, AGAIN]}, D.OTHER_RECOMPUTATION, "recomputed"),
]
