"""Sessions on a GPU that holds one arm of a pair, and what each of their arms was asked to."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

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


@dataclass
class Told:
    """What a session's arms were asked to, one list for each process that became an arm."""

    residences: list[tuple[str, list[str]]] = field(default_factory=list)
    alive: int = 0

    @property
    def order(self):
        """The arms in the order in which they were built."""
        return [arm for arm, _ in self.residences]

    @property
    def asked(self):
        """The same of those that were asked something."""
        return [(arm, operations) for arm, operations in self.residences if operations]


def run(pytester, *options, recipes=RECIPES[:1]):
    pytester.makepyfile(SUITE.format(recipes=recipes))
    return pytester.runpytest("--fp8-gpu=h100", *options)


def noted(monkeypatch):
    """From now on what fake arms are asked to is noted."""
    seen = Told()
    receive, request, close = FakeProcess.receive, FakeProcess.request, FakeProcess.close

    def note_build(self, timeout=0):
        building = self.asked is None
        answer = receive(self, timeout)
        if building:
            assert threading.current_thread() is threading.main_thread(), "the kernel ends an arm with its thread"
            self.told = []
            seen.residences.append((self.spec.case.id, self.told))
            seen.alive += 1
        return answer

    def note_request(self, operation, timeout=0, **arguments):
        assert threading.current_thread() is threading.main_thread()
        self.told.append(operation)
        return request(self, operation, timeout, **arguments)

    def note_close(self):
        seen.alive -= self.alive and hasattr(self, "told")
        close(self)

    monkeypatch.setattr(FakeProcess, "receive", note_build)
    monkeypatch.setattr(FakeProcess, "request", note_request)
    monkeypatch.setattr(FakeProcess, "close", note_close)
    return seen
