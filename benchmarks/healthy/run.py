"""Runs sound workloads as controls are run: real arms on the CPU, every question that their case asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The runner of the controls stands with the suites.
sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))

from benchmarks.healthy.sound import Sound
from control_runner import ControlRunner
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.backends.torchao import TorchAO
from pytest_fp8.errors import Fp8Error
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair

RECIPES = tuple(recipe.name for recipe in TorchAO.recipes)
ALARMS = ("FAIL", "INVALID", "error")
"""What a sound workload must never hear. INCONCLUSIVE and NOT_EXERCISED are no verdict on it, and are counted."""


@dataclass(frozen=True)
class Answer:
    """One question asked of one workload."""

    question: str
    verdict: str
    message: str

    @property
    def alarm(self) -> bool:
        return self.verdict in ALARMS


class Runner:
    """A context: the arms' processes live inside it."""

    def __enter__(self) -> Runner:
        self._pool = ArmPool(None)
        self._controls = ControlRunner(Settings(), lambda: self._pool)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def pair(self, entry: Sound, recipe: str, seed: int = 0) -> Fp8Pair:
        """Both arms, alive. Raises :class:`ArmError`."""
        return self._controls.pair_of(entry.case(recipe), entry.workload(seed))

    def ask(self, entry: Sound, recipe: str, seed: int = 0, steps: int = 0) -> Iterator[Answer]:
        """The questions that the case asks, each by the pair's method of its name; with ``steps`` the loss alone."""
        try:
            pair = self.pair(entry, recipe, seed)
        except Fp8Error as error:
            yield Answer("build", "error", error.message)
            return
        for question in ("loss",) if steps else pair.case.questions:
            try:
                decision = pair.loss(steps) if steps else getattr(pair, question)()
                yield Answer(question, decision.verdict.value, decision.message)
            except Fp8Error as error:
                yield Answer(question, "error", error.message)
