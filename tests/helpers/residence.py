"""Sessions on a GPU that holds one arm of a pair, and what each of their arms was asked to."""

from __future__ import annotations

from helpers.fakes import FakeProcess, asks

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SUITE = f"""
    import pytest
    from pytest_fp8 import Case

    CASES = [
        Case("8b", "torchao", recipe, checkpoint_formats=("safetensors",), resume=False)
        for recipe in {{recipes}}
    ]
{asks("layers", "numerics", "loss", "speedup", "faster", "memory", "checkpoints")}"""
REFERENCE, ARMS = "8b-bf16", [f"8b-torchao-{recipe}" for recipe in RECIPES]


class Told:
    """What a session's arms were asked to, in the order in which they were built."""

    @property
    def order(self):
        return [arm for arm, _ in FakeProcess.world.residences]

    @property
    def asked(self):
        """Those that were asked something, with their operations."""
        return [(arm, operations) for arm, operations in FakeProcess.world.residences if operations]

    @property
    def alive(self):
        return sum(process.alive and process.is_built for process in FakeProcess.world.processes)


def run(pytester, *options, recipes=RECIPES[:1]):
    pytester.makepyfile(SUITE.format(recipes=recipes))
    return pytester.runpytest("--fp8-gpu=h100", *options)
