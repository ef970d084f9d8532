"""Evidence of the numerics question, written by hand, and what its check makes of it."""

from base64 import b64encode
from dataclasses import replace

import numpy as np

from helpers.evidence import CASE, layers_evidence
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.questions.numerics.evidence import ArmNumerics, Gradients, NumericsEvidence, ProductCheck
from pytest_fp8.recipes import FPROP, ROLES

SOUND = ProductCheck(
    layer="up",
    role=FPROP,
    values=16384,
    power=1.0,
    gain=1.001,
    sqnr=28.4,
    own_gain=1.0,
    own_sqnr=28.5,
    gain_error=0.0005,
    lost=0.0,
    underflow=0.01,
)
NAMES = ("head", "down", "up", "enter")
"""Parameters in the order of the backward pass."""


def vector(name, off=0.0, times=1.0):
    """A gradient that is the same for each name, ``off`` by a share of its length in a direction of its own."""
    generator = np.random.default_rng([*name.encode()])
    base, other = generator.normal(size=1024), generator.normal(size=1024)
    return times * (base + off * other)


def gradients(off=0.05, times=1.0, **changes):
    """``off``, ``times``: one value for all names, or a dictionary by name."""

    def of(value, name, default):
        return value.get(name, default) if isinstance(value, dict) else value

    vectors = {name: vector(name, of(off, name, 0.05), of(times, name, 1.0)) for name in NAMES}
    sketches = {name: b64encode(v.astype(np.float32).tobytes()).decode() for name, v in vectors.items()}
    return replace(Gradients(sketches, [], 5.0, 7), **changes)


def evidence(products=(), fp8=None, later=(), evaluated=(), evaluated_later=(), **changes):
    """Healthy evidence of three roles of two layers, but for ``products``, which replace those of their layer and
    role; and for products of evaluations."""
    mine = {(p.layer, p.role): p for layer in ("up", "down") for p in [replace(SOUND, layer=layer)]}
    for role in ROLES:
        for layer in ("up", "down"):
            mine[layer, role] = replace(SOUND, layer=layer, role=role)
    reference = [replace(p, sqnr=55.0, own_sqnr=55.0) for p in mine.values()]
    mine |= {(p.layer, p.role): p for p in products}
    bf16 = ArmNumerics(reference, gradients(off=0.0), gradients(), reference)
    first = list(mine.values())
    sound = [replace(SOUND, layer=p.layer, role=p.role) for p in first]
    later = list(({(p.layer, p.role): p for p in sound} | {(p.layer, p.role): p for p in later}).values())
    mine = ArmNumerics(first, fp8 or gradients(), None, later, evaluated, evaluated_later)
    return NumericsEvidence(mine, replace(bf16, **changes))


def judge(case=CASE, layers=None, **given):
    return check_numerics(case, evidence(**given), layers or layers_evidence())


def wrong(**changes):
    return replace(SOUND, **changes)
