"""Pairs of several cases on one pool, and the builds that were begun."""

from __future__ import annotations

from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms

GIB = 2**30


def pairs(pool, model, *recipes):
    return [PairArms(Case(model, "torchao", recipe), pool, None) for recipe in recipes]


def built(world):
    """The live processes that are arms."""
    return [process for process in world.processes if process.alive and process.spec is not None]


def spares(world):
    """The live processes that were started ahead and are no arm yet."""
    return [process for process in world.processes if process.alive and process.spec is None]
