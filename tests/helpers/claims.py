"""A claim, the cases that it is about, and baselines that answer it: all by hand."""

from __future__ import annotations

import math

from benchmarks.claims.judge import AT_LEAST, Claim, Near, Source
from helpers.baselines import baseline as stored
from pytest_fp8 import Case

CASE, OTHER = Case("454m", "torchao", "tensorwise"), Case("454m", "transformer_engine", "delayed")
SOURCE, ONE = Source("somebody", gpu="h200"), (Near(CASE),)


def baseline(case=CASE, **metrics):
    return stored(case.id, case.digest(), metrics=metrics)


def speed(ratio, processes=4):
    return [[math.log(ratio)] * 6] * processes


def claim(metric="speedup", compare=AT_LEAST, low=1.3, high=None, cases=ONE, source=SOURCE):
    return Claim("it is so", metric, compare, low, low if high is None else high, source, cases)
