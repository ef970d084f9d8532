"""Asks every question of every sound workload, and counts false alarms.

    python -m benchmarks.healthy [--recipe tensorwise] [--seeds 10] [--only hf_]

On 16 cores, in as many processes: for i in {0..15}; do python -m benchmarks.healthy --part $i/16 > $i.txt & done

On any machine: torchao's numerics are emulated on the CPU. Ends with 1 where a sound workload was failed, called
INVALID or stopped by an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The runner of the controls stands with the suites.
sys.path.insert(0, str(Path(__file__).parents[2] / "suites"))

from benchmarks.healthy import habits, models, own_fp8, training  # noqa: F401
from benchmarks.healthy.sound import CATALOGUE, Sound
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--seeds", type=int, default=1, help="draws of weights and data")
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose name has one of these in it")
    parser.add_argument("--steps", type=int, default=0, help="ask the loss alone, over curves of so many steps")
    parser.add_argument("--part", default="0/1", help="every n-th workload, from the i-th on: i/n")
    asked = parser.parse_args()
    index, parts = map(int, asked.part.split("/"))
    chosen = [entry for entry in CATALOGUE if any(word in entry.name for word in asked.only)][index::parts]
    answers: list[Answer] = []
    start = time.monotonic()
    with Runner() as runner:
        for seed, entry in ((seed, entry) for seed in range(asked.seeds) for entry in chosen):
            began = time.monotonic()
            recipes = filter(entry.takes, asked.recipe)
            new = [answer for recipe in recipes for answer in runner.ask(entry, recipe, seed, asked.steps)]
            answers += new
            verdicts = " ".join(f"{answer.question} {answer.verdict}" for answer in new)
            print(f"{entry.name:32} seed {seed}  {time.monotonic() - began:5.1f} s  {verdicts}", flush=True)
            for message in dict.fromkeys(answer.message for answer in new if answer.verdict != "PASS"):
                print(f"    {message}", flush=True)
    counted = Counter(answer.verdict for answer in answers)
    print(f"\n{len(chosen)} workloads, {len(answers)} questions in {time.monotonic() - start:.0f} s: {dict(counted)}")
    return int(any(answer.alarm for answer in answers) or not answers)


if __name__ == "__main__":
    sys.exit(main())
