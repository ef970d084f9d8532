"""What questions ask of two arms, and the one loop that asks it.

A question gathers its evidence in a generator. It yields an :class:`Ask`, or several in a tuple, and is given the
answers::

    reference, fp8 = yield Ask(REFERENCE, "ledger"), Ask(FP8, "ledger")

Between two asks it is plain code, which may judge what it has and ask for more. Where both arms live, one question runs
at a time, and asks of a tuple go to both arms at once. Where arms take turns, all questions of a session run side by
side: whatever the live arm can answer is asked before the other one is built.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pytest_fp8.arms.pool import ALONE, RECORDED, Arm, ArmPool
from pytest_fp8.arms.scratch import CHECKPOINTS, temporary_folder
from pytest_fp8.case import Case
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError
from pytest_fp8.gpu import Conditions, conditions
from pytest_fp8.plain import from_plain

if TYPE_CHECKING:
    from pytest_fp8.arms.process import ArmProcess

T = TypeVar("T")

REFERENCE, FP8 = "reference", "fp8"
"""The two arms; of a comparison base's and head's."""
BOTH = "both arms"


class Ask:
    """One request to one arm. Its answer is kept, and given to whoever asks the same of this arm again."""

    def __init__(
        self, arm: str, operation: str, into: type[Any] | None = None, fresh: bool = False, **arguments: Any
    ) -> None:
        """``into``: the record that the answer is read as. ``fresh``: the answer depends on what the process did
        before, and is not kept."""
        self.arm, self.operation, self.into, self.fresh, self.arguments = arm, operation, into, fresh, arguments

    def read(self, answer: Any) -> Any:
        return answer if self.into is None else from_plain(self.into, answer)


Asking: TypeAlias = Generator["Ask | tuple[Ask, ...]", Any, T]
"""A question under way, which returns a ``T``. An :class:`ArmError` is raised in it where it asked."""
Begin: TypeAlias = Callable[[], Asking[T]]


class TwoArms:
    """Two arms that are measured against each other: a case's, or one case at two commits."""

    def __init__(self, case: Case, pool: ArmPool, reference: Arm, fp8: Arm) -> None:
        self.case, self.pool = case, pool
        self.arms = {REFERENCE: reference, FP8: fp8}

    @property
    def pair(self) -> tuple[Arm, Arm]:
        return self.arms[REFERENCE], self.arms[FP8]

    def start(self) -> None:
        """Have both arms alive."""
        self.pool.ensure(*self.pair)

    def renew(self) -> None:
        """Replace both processes by fresh ones. A process that was profiled launches more slowly than before."""
        self.pool.renew(*self.pair)
        self.start()

    @property
    def takes_turns(self) -> bool:
        """Whether the arms do not fit the GPU together."""
        return self.pool.takes_turns(self.arms[FP8])

    @property
    def tight(self) -> bool:
        """Whether each arm must give its cached memory back before the other runs."""
        return self.pool.tight(*self.pair)

    def facts(self, arm: str) -> Mapping[str, Any]:
        """What the arm said of itself when it was last built; empty before."""
        return self.arms[arm].facts

    def conditions(self) -> Conditions | None:
        """Clocks and neighbours of the arms' GPUs; ``None`` on a CPU. The question itself lets the GPU stand idle."""
        pool = self.pool
        return conditions(pool.pids, pool.contexts, self.case.gpus) if pool.gpu is not None else None

    def folder(self, what: str) -> Path:
        """A folder for files of the reference, kept for the other cases that share it."""
        return self.pool.folder(self.arms[REFERENCE], what)

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """A folder for files that are deleted when the block is left."""
        return temporary_folder(CHECKPOINTS)

    # -- what is known --------------------------------------------------------------------------------------------

    def kept(self, what: str, begin: Begin[T], arm: str = BOTH) -> Asking[T]:
        """Several answers of one arm, or of both, under a name: gathered once, for all cases that share the arm."""
        key = self._key(arm), what
        if key not in self.pool.cache:
            self.pool.cache[key] = yield from begin()
        found: T = self.pool.cache[key]
        return found

    def once(self, what: str, make: Callable[[], T]) -> T:
        """Anything else that is made once for these two arms."""
        key = self._key(BOTH), what
        if key not in self.pool.cache:
            self.pool.cache[key] = make()
        found: T = self.pool.cache[key]
        return found

    def answered(self, *what: str) -> bool:
        """Whether there is an answer of the FP8 arm, or of both, whose name begins so."""
        arms = self._key(FP8), self._key(BOTH)
        return any(arm in arms and name.startswith(what) for arm, name in self.pool.cache)

    def known(self, begin: Begin[T]) -> T | None:
        """What a question returns from answers that are there; ``None`` where it would ask an arm."""
        question = _Question(begin)
        while not question.ended and not self._open(question):
            question.go_on()
        question.asking.close()
        found: T | None = question.result
        return found

    def _key(self, arm: str) -> str:
        return " ".join(each.key for each in self.pair) if arm == BOTH else self.arms[arm].key

    def _name(self, ask: Ask) -> tuple[str, str]:
        """Under which its answer is kept."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(ask.arguments.items()))
        return self._key(ask.arm), f"{ask.operation}({arguments})"

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self, begin: Begin[T]) -> T:
        """What the question returns. Raises what it ends in."""
        question = _Question(begin)
        self._run([question])
        if question.error is not None:
            raise question.error
        found: T = question.result
        return found

    def gather(self, questions: Mapping[str, Begin[Any]]) -> dict[str, Exception]:
        """Run several questions in as few builds of arms as can be, the first ones first. Gives the errors of those
        that ended in one. ``KeyboardInterrupt`` and whatever else ends the wait for an arm ends them all."""
        running = {name: _Question(begin) for name, begin in questions.items()}
        self._run(list(running.values()))
        return {name: each.error for name, each in running.items() if each.error is not None}

    def _run(self, questions: list[_Question]) -> None:
        """Let the first question that can go on do so. Where all wait for an arm that is not alive, build it. One that
        cannot be built gives all who wait for it the same error."""
        not_built: dict[str, Exception] = {}
        built = ""
        try:
            while going := [each for each in questions if not each.ended]:
                ready = next((each for each in going if self._can_go_on(each, not_built)), None)
                if ready is not None:
                    self._go_on(ready, not_built)
                    continue
                wanted = [self._open(each)[0].arm for each in going]
                # One that died while the others worked is asked on before the other arm.
                built = built if built in wanted else wanted[0]
                try:
                    self.pool.live(self.arms[built])
                except Exception as error:
                    not_built[built] = error
        finally:
            for each in questions:
                each.asking.close()

    def _open(self, question: _Question) -> list[Ask]:
        """What it waits for. Answers that are there by now are taken."""
        for index, ask in enumerate(question.asks):
            if index not in question.answers and not ask.fresh and self._name(ask) in self.pool.cache:
                question.answers[index] = self.pool.cache[self._name(ask)]
        return [ask for index, ask in enumerate(question.asks) if index not in question.answers]

    def _can_go_on(self, question: _Question, not_built: Mapping[str, Exception]) -> bool:
        wanted = self._open(question)
        return not wanted or any(ask.arm in not_built or self.pool.is_alive(self.arms[ask.arm]) for ask in wanted)

    def _go_on(self, question: _Question, not_built: dict[str, Exception]) -> None:
        """Ask what live arms can answer; with all answers the question goes on until it asks again, or ends."""
        try:
            for ask in self._open(question):
                if ask.arm in not_built:
                    raise not_built[ask.arm]
            self._ask([ask for ask in self._open(question) if self.pool.is_alive(self.arms[ask.arm])], question)
            if not self._open(question):
                question.go_on()
        except Exception as error:
            question.fail(error)
        if question.error is not None and self._make_room(question):
            not_built.clear()
            question.begin_again()

    def _ask(self, asks: list[Ask], question: _Question) -> None:
        """Of arms that can work side by side, the FP8 arm works on its first ask while the reference answers all of
        its own."""
        ahead = next((ask for ask in asks if ask.arm == FP8), None)
        if ahead is None or not self._side_by_side(asks):
            for ask in asks:
                arm, _ = self._process(ask, question)
                self._note(question, ask, arm.request(ask.operation, **ask.arguments))
            return
        arm, process = self._process(ahead, question)
        process.send(ahead.operation, **ahead.arguments)
        try:
            self._ask([ask for ask in asks if ask.arm != FP8], question)
        except BaseException:
            # The late answer must not be read as another one's.
            process.close()
            raise
        with self.pool.stopwatch.clock(arm.label, ahead.operation):
            self._note(question, ahead, process.receive())
        self._ask([ask for ask in asks if ask.arm == FP8 and ask is not ahead], question)

    def _side_by_side(self, asks: list[Ask]) -> bool:
        """Whether the arms of these asks can work at the same time: nothing is timed or weighed, each has a process of
        its own, and the GPU has room for steps of both."""
        arms = [self.arms[name] for name in dict.fromkeys(ask.arm for ask in asks)]
        alone = ALONE if self.pool.gpu is None else (*ALONE, *RECORDED)
        if len(arms) < 2 or any(ask.operation in alone for ask in asks):
            return False
        apart = len({self.pool.live(arm).pid for arm in arms}) == len(arms)
        return apart and not self.pool.tight(*arms)

    def _process(self, ask: Ask, question: _Question) -> tuple[Arm, ArmProcess]:
        """The arm that is asked, and its process. What a question asks is of one process of each arm: raises the death
        of one that ended by itself. One that the pool closed is no death: the other arm had its turn."""
        arm = self.arms[ask.arm]
        process, before = self.pool.live(arm), question.seen.get(ask.arm)
        if before is not None and before is not process and before in self.pool.deaths:
            raise self.pool.deaths[before]
        question.seen[ask.arm] = process
        return arm, process

    def _note(self, question: _Question, ask: Ask, answer: Any) -> None:
        found = question.answers[question.asks.index(ask)] = ask.read(answer)
        if not ask.fresh:
            self.pool.cache[self._name(ask)] = found

    def _make_room(self, question: _Question) -> bool:
        """Whether a question that ran out of memory may begin again: with these two arms alone on the GPU; where they
        were, or that did not help, by turns. Both start afresh."""
        error, pool = question.error, self.pool
        short = isinstance(error, ArmError) and error.code is R.OUT_OF_MEMORY
        if not short or self.pair[1].spec.device != "cuda" or self.takes_turns:
            return False
        if not pool.end_but(*self.pair) or question.began > 1:
            pool.separate(*self.pair)
        pool.renew(*self.pair)
        return True


@dataclass
class _Question:
    """A question under way."""

    begin: Begin[Any]
    began: int = 0
    """How often."""
    asks: tuple[Ask, ...] = ()
    """What it waits for."""
    several: bool = False
    """Whether these came as a tuple, as the answers then do."""
    answers: dict[int, Any] = field(default_factory=dict)
    """To those asks, by their index."""
    seen: dict[str, ArmProcess] = field(default_factory=dict)
    """Arm -> the process that answered last."""
    ended: bool = False
    result: Any = None
    error: Exception | None = None
    asking: Asking[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        self.began, self.ended, self.error, self.seen = self.began + 1, False, None, {}
        self.asking = self.begin()
        self._resume(lambda: next(self.asking))

    def go_on(self) -> None:
        """All that it asked is answered."""
        found = tuple(self.answers[index] for index in range(len(self.asks)))
        self._resume(lambda: self.asking.send(found if self.several else found[0]))

    def fail(self, error: Exception) -> None:
        """One of its asks ended in this error."""
        self._resume(lambda: self.asking.throw(error))

    def _resume(self, step: Callable[[], Ask | tuple[Ask, ...]]) -> None:
        try:
            wanted = step()
        except StopIteration as end:
            self.ended, self.result = True, end.value
        except Exception as error:
            self.ended, self.error = True, error
        else:
            self.several = isinstance(wanted, tuple)
            self.asks, self.answers = wanted if isinstance(wanted, tuple) else (wanted,), {}
