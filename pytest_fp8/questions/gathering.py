"""What each question asks of both arms, as tasks that can go on side by side: for arms that take turns on the GPU.

There each change of the resident arm costs a build. So all that this session's tests will ask of a pair is gathered
when the first of them asks, and the questions find it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pytest_fp8.questions.arms import PairArms
from pytest_fp8.questions.checkpoints.carry import reference_source, transfers_of
from pytest_fp8.questions.layers.evidence import fp8_layers, reference_layers
from pytest_fp8.questions.ledger.evidence import ledgers_of, reference_ledger
from pytest_fp8.questions.loss.evidence import curves_of, reference_curves
from pytest_fp8.questions.memory import memory_of
from pytest_fp8.questions.numerics.draws import with_further_draws
from pytest_fp8.questions.numerics.evidence import numerics_of, reference_numerics

Task = Callable[[], object]

NEEDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("layers", "reference ledger", "ledger"),
    "numerics": ("layers", "reference numerics", "numerics"),
    "loss": ("curves", "loss", "reference ledger", "ledger"),
    "speedup": ("timing", "reference layers", "layers", "reference ledger", "ledger"),
    "memory": ("memory", "reference ledger", "ledger"),
    "checkpoints": ("reference source", "checkpoints"),
}
"""Question -> its tasks. An error of one of them is the question's."""


def tasks_of(arms: PairArms, timing: Task, loss: Task, twin: bool) -> dict[str, list[Task]]:
    """In the order in which they go first in each residence: timing must see a process that was not profiled; then
    comes what the reference answers alone.

    ``twin``: whether the loss question wants twins of the reference.
    """
    seeds = range(arms.case.seeds if arms.case.asks("loss") else 0)
    return {
        "timing": [timing],
        "reference layers": [lambda: reference_layers(arms)],
        "reference ledger": [lambda: reference_ledger(arms)],
        "reference numerics": [lambda: reference_numerics(arms)],
        "reference source": [lambda: reference_source(arms)],
        # One task for each curve: a single one would wait for the other arm after each seed.
        "curves": [
            *(partial(reference_curves, arms, seed, twin) for seed in seeds),
            *(partial(curves_of, arms, seed, twin) for seed in seeds),
        ],
        "layers": [lambda: fp8_layers(arms)],
        "ledger": [lambda: ledgers_of(arms, arms.case.backend)],
        "numerics": [lambda: with_further_draws(arms, numerics_of(arms))],
        "memory": [lambda: memory_of(arms)],
        "loss": [loss],
        "checkpoints": [lambda: transfers_of(arms)],
    }


@dataclass
class Gathering:
    """What this session's tests ask of one pair, gathered at once."""

    arms: PairArms
    asked: Collection[str]
    """The questions that this session's tests ask of this case, as their marks name them."""
    tasks: Callable[[], Mapping[str, Sequence[Task]]]
    gathered: bool = False
    _errors: dict[str, BaseException] = field(default_factory=dict)

    def has(self, question: str) -> bool:
        """Whether the evidence of this question is there; it is gathered now where it was to be. A question that no
        mark names gathers its own when it asks.

        Raises what ended one of the question's tasks: its other tests get the same error, and build no arm again.
        """
        if not (self.asked and self.arms.takes_turns):
            return False
        if not self.gathered:
            self._gather()
        if question in self._errors:
            raise self._errors[question]
        return question in self.asked

    def _gather(self) -> None:
        wanted = {name for question in self.asked for name in NEEDS[question]}
        tasks = {
            f"{name} {index}": task
            for name, parts in self.tasks().items()
            if name in wanted
            for index, task in enumerate(parts)
        }
        errors = self.arms.gather(tasks)
        self.gathered = True
        for question in self.asked:
            of_question = [e for task, e in errors.items() if task.rpartition(" ")[0] in NEEDS[question]]
            if of_question:
                self._errors[question] = of_question[0]
