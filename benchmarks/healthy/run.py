"""Runs sound workloads as controls are run: real arms on the CPU, every question that their case asks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The runner of the controls stands with the suites.
sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))

from benchmarks.healthy.sound import Sound
from control_runner import ControlRunner
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.case import QUESTIONS
from pytest_fp8.errors import Fp8Error
from pytest_fp8.options import Settings
from pytest_fp8.pair import Fp8Pair

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ALARMS = ("FAIL", "INVALID", "error")
"""What a sound workload must never hear. INCONCLUSIVE and NOT_EXERCISED are no verdict on it, and are counted."""


@dataclass(frozen=True)
class Answer:
    """One question asked of one workload."""

    workload: str
    recipe: str
    seed: int
    question: str
    verdict: str
    headline: str
    message: str

    @property
    def alarm(self) -> bool:
        return self.verdict in ALARMS

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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

    def ask(self, entry: Sound, recipe: str, seed: int = 0, questions: Collection[str] = QUESTIONS) -> Iterator[Answer]:
        """Those of the questions that the case asks, each by the pair's method of its name."""
        try:
            pair = self.pair(entry, recipe, seed)
        except Fp8Error as error:
            yield Answer(entry.name, recipe, seed, "build", "error", error.headline, error.message)
            return
        for question in (each for each in pair.case.questions if each in questions):
            try:
                decision = getattr(pair, question)()
            except Fp8Error as error:
                yield Answer(entry.name, recipe, seed, question, "error", error.headline, error.message)
                continue
            verdict = decision.verdict.value
            yield Answer(entry.name, recipe, seed, question, verdict, decision.headline, decision.message)


def counted(answers: list[Answer]) -> dict[str, int]:
    """How many questions were asked, and how many ended with each verdict."""
    return {"asked": len(answers), **dict(sorted(Counter(answer.verdict for answer in answers).items()))}
