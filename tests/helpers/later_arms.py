"""Pairs of several cases on one pool, the arms of later ones, and the builds that were begun."""

from __future__ import annotations

from pytest_fp8 import Case
from pytest_fp8.arms.pair import PairArms, make_arm

GIB = 2**30
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def pairs(pool, model, *recipes):
    return [PairArms(Case(model, "torchao", recipe), pool, None) for recipe in recipes]


def arms_of(*later):
    return [make_arm(case, pair.pool, None, "") for pair in later for case in (pair.case.reference(), pair.case)]


def built(world):
    """The live processes that are arms."""
    return [process for process in world.processes if process.alive and process.spec is not None]


def started(world):
    """The cases whose build was begun and whose process is alive, in order."""
    return [process.spec.case.id for process in built(world)]


def spares(world):
    """The live processes that were started ahead and are no arm yet."""
    return [process for process in world.processes if process.alive and process.spec is None]


def ahead(pool, later):
    """The FP8 arms of later pairs."""
    return [make_arm(pair.case, pool, None, "") for pair in later]
