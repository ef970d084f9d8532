"""What a session is going to build, what comes next, and how long it may take: known once its tests are collected.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_fp8.arms.memory_plan import FILL, GIB, exceed_together, peak_bytes
from pytest_fp8.case import OWN, Case
from pytest_fp8.gpu import Gpu
from pytest_fp8.zoo.shapes import SHAPES

BUILD = (15.0, 1.2)
"""Seconds of a build of arms, and seconds more for each 1e9 parameters: rough. Seen: two 1B arms at a time in 18 s on
H200s and 25 s on an H100; arms of 8B in 11 s each on an H100, in a process that was started ahead, and in 26 s on an
H200; arms of two ranks with half of 8B's layers in 16 to 22 s on H200s. The very first run on a machine, which compiles
and reads libraries from disk, takes longer."""
CACHED = (4.0, 0.7)
"""The same where the compilers' caches have the code, as of what is built again. Seen on an H100: 9 and 10 s for
8B."""
ANSWERS = {
    "layers": (2.0, 1.4),
    "numerics": (2.0, 2.0),
    "loss": (5.0, 14.0),
    "speedup": (12.0, 0.7),
    "memory": (0.3, 0.1),
    "checkpoints": (1.5, 2.0),
}
"""The same of the answers to each question: rough. They are fitted to a gate on an H100, where a case took 11 s of them
for tiny, 64 s for 1B and 76 s for 8B, its share of the reference's with it; 65 s for half of 8B's layers on two H200s.
What a reference answers alone comes on top for its first case."""
FURTHER_PAIR = (15.0, 1.0)
"""The same of the blocks of a further pair of processes, as an update times them: rough. Seen: 16 to 20 s for 1B on an
H100."""
RANKS_PAIR = (6.0, 10.0)
"""The same of each pair of arms on several GPUs in an update, the first one included, where it is more: rough. Seen: 50
to 66 s for half of 8B's layers on two H100s, which take longer turns, 20 s on two H200s; 18 s for 1B."""
AS_PLANNED = 60.0
"""Seconds that count as planned and taken before the first case: one early case says little of the others."""
LOSS_RUNS = 3
"""Training runs of each seed of the loss question: FP8's, BF16's and its twin's."""
BUSY = 10.0
"""Seconds of the busy times that an update takes of each pair that does not take turns: rough. Seen with Transformer
Engine at 1B: 10 to 13 s on H100s, 6 s on an H200."""


@dataclass(frozen=True)
class Build:
    """Arms that are built at the same time, and what they then answer."""

    arms: tuple[str, ...]
    build: float
    """Seconds."""
    answers: float
    """Seconds."""
    case: str
    """The case that asks for it."""


@dataclass(frozen=True)
class SessionPlan:
    """The builds of a session in their order. Arms that fit the GPU together stay for each other."""

    builds: Sequence[Build]
    cases: int
    turns: Sequence[str] = ()
    """Models whose arms do not fit the GPU together."""
    too_large: Sequence[str] = ()
    """Arms that by estimate do not fit it alone; each is tried once."""
    memory: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    """Of cases of own models: the training steps of their loss question, at least. How long one takes nobody knows
    before an arm is built."""

    def knowing(self, step: Mapping[str, float]) -> SessionPlan:
        """This plan once the seconds of a training ``step`` are known, by case: they count for own models."""
        known = [Build((), 0.0, count * step[case], case) for case, count in self.steps.items() if case in step]
        return replace(self, builds=[*self.builds, *known])

    @property
    def seconds(self) -> float:
        return sum(each.build + each.answers for each in self.builds)

    def pace(self, took: Mapping[str, float]) -> float:
        """How many times as long as planned cases take, by those that ran: not less than once, for one that fails
        early says nothing of the others. ``took``: seconds of each."""
        known = [case for case in took if self.of(case)]
        seen = AS_PLANNED + sum(took[case] for case in known)
        return max(1.0, seen / (AS_PLANNED + sum(map(self.of, known))))

    def left(self, unfinished: Collection[str], case: str, spent: float, pace: float = 1.0) -> float:
        """Seconds until the end at this pace; 0 where they are used up. ``unfinished``: the cases with tests to come.
        ``spent``: seconds on ``case``, which runs."""
        here = pace * self.of(case) if case in unfinished else 0.0
        return max(0.0, here - spent) + pace * sum(self.of(other) for other in {*unfinished} - {case})

    def of(self, case: str) -> float:
        """Seconds of the builds that a case asks for, and of their answers."""
        return sum(each.build + each.answers for each in self.builds if each.case == case)

    def line(self) -> str:
        """The plan in one line."""
        arms = sum(len(each.arms) for each in self.builds)
        said = f"fp8: {self.cases} case(s), {arms} arm(s) to build, about {in_words(self.seconds)}"
        if self.steps:
            said += " and as long as own models train"
        if self.turns:
            said += f"; the arms of {', '.join(self.turns)} take turns: {self.memory / GIB:.0f} GiB do not hold both"
        if self.too_large:
            said += f"; probably too large for it: {', '.join(self.too_large)}"
        return said

    def table(self) -> list[str]:
        """The builds in their order, one a line."""
        return [
            f"  {index:>3}. {' and '.join(each.arms)}: "
            f"build about {each.build:.0f} s, answers about {each.answers:.0f} s"
            for index, each in enumerate(self.builds, 1)
        ]


def plan_session(asked: Sequence[tuple[Case, frozenset[str]]], gpu: Gpu, processes: int = 1) -> SessionPlan:
    """``asked``: the cases that run, in their order, and the questions that tests ask of each. ``processes``: fresh
    pairs of processes in which each is timed, several where baselines are updated."""
    builds: list[Build] = []
    turns: dict[str, None] = {}
    too_large: list[str] = []
    alive: set[str] = set()
    cached: set[str] = set()
    for case, wanted in asked:
        reference = case.reference().id
        # BF16 against BF16 is two processes.
        arms = reference, case.id if case.id != reference else f"{case.id} again"
        order: list[tuple[str, ...]]
        fits = peak_bytes(case) <= gpu.memory
        questions = wanted if fits else frozenset[str]()
        rounds = processes if "speedup" in questions else 1
        if not fits:
            too_large.append(case.id)
            order, alive = [(case.id,)], set[str]()
        elif exceed_together(case, gpu):
            turns[case.model] = None
            order, alive = _in_turns(arms, questions, alive, rounds)
        else:
            missing = tuple(arm for arm in arms if arm not in alive)
            order, alive = _together(case, gpu, [missing, *[arms] * (rounds - 1)]), {*arms}
        answers = _answers(case, gpu, questions, rounds, alone=arms[0] not in cached) / max(1, len(order))
        for together in order:
            base, more = CACHED if cached.issuperset(together) else BUILD
            builds.append(Build(together, base + more * _billions(case), answers, case.id))
            cached |= {*together}
    steps = {
        case.id: LOSS_RUNS * case.seeds * case.horizon
        for case, wanted in asked
        if case.model == OWN and "loss" in wanted
    }
    return SessionPlan(builds, len(asked), list(turns), too_large, gpu.memory, steps)


def _in_turns(
    arms: tuple[str, str], questions: frozenset[str], alive: set[str], rounds: int
) -> tuple[list[tuple[str, ...]], set[str]]:
    """The builds of one case, and what is alive then. The reference is timed before and after the FP8 arm, and loads
    its checkpoint; what else it answers is asked once for all cases, before the first one."""
    reference, fp8 = arms
    first = [] if reference in alive else [reference]
    if questions & {"speedup", "checkpoints"}:
        order, left = [*first, fp8, reference, *[reference, fp8, reference] * (rounds - 1)], reference
    else:
        order, left = [*(first if not alive else []), fp8], fp8
    return [(arm,) for arm in order], {left}


def _together(case: Case, gpu: Gpu, order: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Arms are built at the same time where the GPU holds a step of each, else one after the other."""
    if peak_bytes(case.reference()) + peak_bytes(case) <= FILL * gpu.memory:
        return [arms for arms in order if arms]
    return [(arm,) for arms in order for arm in arms]


def _answers(case: Case, gpu: Gpu, questions: Collection[str], rounds: int, alone: bool) -> float:
    """Seconds. ``rounds``: in how many pairs of processes it is timed. ``alone``: whether what the reference answers
    for all cases comes on top."""
    size = _billions(case)
    times = {question: base + more * size for question, (base, more) in ANSWERS.items() if question in questions}
    seconds = sum(times.values()) + alone * sum(times[each] for each in times if each != "speedup")
    if rounds == 1:
        return seconds
    pair, first = FURTHER_PAIR[0] + FURTHER_PAIR[1] * size, times["speedup"]
    if case.gpus > 1:
        pair = max(pair, RANKS_PAIR[0] + RANKS_PAIR[1] * size)
        first = max(first, pair)
    busy = 0.0 if exceed_together(case, gpu) else rounds * BUSY
    return seconds - times["speedup"] + first + (rounds - 1) * pair + busy


def _billions(case: Case) -> float:
    """1e9 parameters; 0 for own models, of which nothing is known."""
    return SHAPES[case.model].parameters / 1e9 if case.model != OWN else 0.0


def next_case(cases: Sequence[Case], case: Case, is_worker: bool = False) -> list[Case]:
    """The case that comes after this one, behind its reference: processes for both may start. ``cases``: those of the
    GPU that run in this session, in their order. A worker of pytest-xdist will probably be given the next case of the
    same model; another one may be given the others."""
    position = next((index for index, each in enumerate(cases) if each.id == case.id), len(cases))
    later = cases[position + 1 :]
    found = ([each for each in later if is_worker and each.model == case.model] or later)[:1]
    return [one for each in found for one in (each.reference(), each)]


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
