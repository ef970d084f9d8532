"""What a test asks: ``fp8_pair``. Each question asks both arms, judges, and is noted for the record.

``fp8_pair.loss()`` gives the decision; ``fp8_pair.assert_loss()`` also fails the test where the verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_fp8.arms.pair import PairArms, beside_another
from pytest_fp8.arms.pool import Arm
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.case import ON_A_GPU, OWN, QUESTIONS, Case, field_value
from pytest_fp8.errors import CheckFailed, Fp8Error
from pytest_fp8.options import FRESH_PAIRS, Settings
from pytest_fp8.plan import Asking, Begin
from pytest_fp8.questions import pays
from pytest_fp8.questions.asks import cannot, fp8_layers, ledgers_of, memory_of, numerics_of, reference_ledger
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.layers.check import STORED, LayersFigures, check_layers
from pytest_fp8.questions.ledger.compare import blame_in_ledger, unless_unlike
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.questions.loss.check import LossFigures, check_loss, loss_of
from pytest_fp8.questions.loss.evidence import LossEvidence, is_cross_entropy
from pytest_fp8.questions.memory import check_memory
from pytest_fp8.questions.numerics.check import check_numerics, with_further_draws
from pytest_fp8.questions.speed.check import Row, SpeedQuestion
from pytest_fp8.questions.speed.evidence import TimingEvidence, timing_of
from pytest_fp8.recipes import known_backend
from pytest_fp8.report.record import CaseNotes
from pytest_fp8.stats.components import MEASURED, Components
from pytest_fp8.stats.looks import GATED_CASES
from pytest_fp8.verdicts import Decision, Verdict, passed

if TYPE_CHECKING:
    from pytest_fp8.compare import Comparison

__tracebackhide__ = True
"""For pytest: a failure is the user's line, not one of this module's."""

T = TypeVar("T")
Answer = tuple[Decision, list[Row]]
"""A decision, and what a baseline stores of it."""


class Fp8Pair:
    """Both arms of one case. ``bf16`` and ``fp8`` are the live arms, for a test's own questions. Every question raises
    :class:`ArmError` where an arm fails."""

    used = False
    """Whether the test that has it asked a question, or took one of its arms."""

    def __init__(
        self,
        arms: PairArms,
        settings: Settings,
        notes: CaseNotes,
        baseline: Baseline | None,
        baseline_file: str,
        gated_cases: int = GATED_CASES,
        components: Components = MEASURED,
        host_bound: bool = False,
        compare_with_base: Callable[[], Comparison] | None = None,
        asked: Collection[str | None] = (None,),
    ) -> None:
        """``asked``: what this session's tests ask, as their marks name it; ``None``: a test that may ask any question.
        Where one may ask for the speed, that is measured before the others. ``compare_with_base``: times base's FP8 arm
        beside this one; ``None`` where no base was named. ``host_bound``: whether a stored session is."""
        self.case: Case = arms.case
        self.baseline = baseline
        self._arms, self._settings, self.notes = arms, settings, notes
        pairs = FRESH_PAIRS if settings.update else None
        speed = SpeedQuestion(arms, host_bound, self._history, components, baseline_file, gated_cases, pairs)
        self.speed_question = speed
        self._compare_with_base = compare_with_base
        self._time_first = self.case.asks("speedup") and not {None, "speedup"}.isdisjoint(asked)
        self._asked = {question for question in asked if question is not None}
        if self._asked and self._time_first:
            self._asked.add("speedup")
        self._gathered: dict[str, Exception] | None = None
        """The errors of the questions that were asked together, once they were; of arms that take turns."""
        speed.timer.on_pair = lambda recording: notes.facts(timing=recording)

    _judge_losses: Callable[[LossEvidence], Decision] = staticmethod(check_loss)
    _least_seeds = 1
    """With fewer no gap is stored."""

    @property
    def bf16(self) -> Arm:
        self.used = True
        return self._arms.bf16

    @property
    def fp8(self) -> Arm:
        self.used = True
        return self._arms.fp8

    def start(self) -> None:
        """Have both arms alive."""
        self._arms.start()

    def evidence(self, begin: Begin[T], question: str = "") -> T:
        """What a question's generator gathers: ``fp8_pair.evidence(fp8_layers)``."""
        self._before(question)
        return self._arms.run(begin)

    def timing_evidence(self, look: int = 0) -> TimingEvidence:
        """The evidence of one look of :data:`pytest_fp8.stats.looks.GATE`."""
        return self.evidence(lambda: timing_of(self._arms, self.speed_question.timer, look), "speedup")

    # -- decisions ------------------------------------------------------------------------------------------------

    def layers(self) -> Decision:
        """Is FP8 really running: every Linear accounted for, every product executed, the recipe in force."""
        return self._decide("layers")

    def numerics(self) -> Decision:
        """Does FP8 compute what it should: operand formats, each layer's products, gradients against BF16's."""
        return self._decide("numerics")

    def loss(self, steps: int | None = None) -> Decision:
        """Is the loss still right: curves of several seeds against BF16's. ``steps``: of each curve, by default the
        case's own; no baseline stores what curves of another length gave."""
        return self._decide("loss", None if steps is None else field_value("steps", steps))

    def faster(self, floor: float | None = None) -> Decision:
        """Is FP8 faster than BF16 by the floor: ``floor`` times, by default the case's own."""
        return self._decide("faster", self.case.floor if floor is None else field_value("floor", floor))

    def speedup(self) -> Decision:
        """Is the speedup still that of the stored baseline. The floor is the question of :meth:`faster`."""
        return self._decide("speedup")

    def memory(self) -> Decision:
        """What does it cost in memory: peaks of one training step."""
        return self._decide("memory")

    def checkpoints(self) -> Decision:
        """Can I switch back: checkpoints carried both ways."""
        return self._decide("checkpoints")

    def where_it_pays(self) -> Decision:
        """Which layers and which recipe gain time here, and what measuring the recommended set said. Judges nothing: it
        passes whatever pays."""
        if not self.case.asks("speedup"):
            return self._note(pays.QUESTION, cannot(self.case, "speedup"))
        if known_backend(self.case.backend).brings_model:
            return self._note(pays.QUESTION, pays.not_of(self.case))
        evidence = self.evidence(lambda: pays.pays_of(self._arms, self.speed_question.first_timing()))
        proof, why_not = None, ""
        if evidence.measurable:
            try:
                proof = self._arms.once(f"pays {evidence.advice}", lambda: self._proved(evidence.advice))
            except Fp8Error as error:
                why_not = error.first_line
        return self._note(pays.QUESTION, pays.told(self.case, evidence, proof, why_not))

    # -- assertions -----------------------------------------------------------------------------------------------

    def assert_layers(self) -> Decision:
        """Fail the test where :meth:`layers` says FAIL; under ``--fp8-strict``, unless it says PASS or IMPROVED."""
        return self._require("layers", self.layers)

    def assert_numerics(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`numerics`."""
        return self._require("numerics", self.numerics)

    def assert_loss(self, steps: int | None = None) -> Decision:
        """As :meth:`assert_layers`, of :meth:`loss`."""
        return self._require("loss", partial(self.loss, steps))

    def assert_faster(self, floor: float | None = None) -> Decision:
        """As :meth:`assert_layers`, of :meth:`faster`."""
        return self._require("faster", partial(self.faster, floor))

    def assert_speedup(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`speedup`."""
        return self._require("speedup", self.speedup)

    def assert_memory(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`memory`."""
        return self._require("memory", self.memory)

    def assert_checkpoints(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`checkpoints`."""
        return self._require("checkpoints", self.checkpoints)

    # -- what each question asks, and how it is judged --------------------------------------------------------------

    def _ledgers(self) -> Asking[TwoLedgers]:
        return (yield from ledgers_of(self.case.backend))

    def _layers(self, _: float | None) -> Asking[Answer]:
        ledgers = yield from self._ledgers()
        stored = {name: min(self._stored(name)) for name in STORED if self._stored(name)}
        decision = yield from self._presence(ledgers, stored)
        figures = decision.figures
        assert isinstance(figures, LayersFigures)
        return decision, [(name, [value], None) for name, value in figures.stored().items()]

    def _presence(self, ledgers: TwoLedgers, stored: Mapping[str, float]) -> Asking[Decision]:
        return check_layers(self.case, (yield from fp8_layers()), stored, ledgers)

    def _numerics(self, _: float | None) -> Asking[Answer]:
        first = yield from numerics_of()
        layers = yield from fp8_layers()
        evidence = yield from with_further_draws(self.case, first)
        decision = check_numerics(self.case, evidence, layers)
        if decision.verdict is Verdict.FAIL:
            decision = blame_in_ledger(decision, (yield from self._ledgers()))
        return decision, []

    def _loss(self, steps: float | None) -> Asking[Answer]:
        evidence = yield from self.loss_evidence(int(steps or 0))
        decision = unless_unlike(self._judge_losses(evidence), (yield from self._ledgers()))
        figures = decision.figures
        assert isinstance(figures, LossFigures)
        gaps = list(figures.gaps) if steps is None and len(evidence.fp8) >= self._least_seeds else []
        return decision, [("loss_gap", gaps, figures.margin)]

    def loss_evidence(self, steps: int = 0) -> Asking[LossEvidence]:
        """Curves for the case's seeds, and for further ones while these do not decide; 0 ``steps``: the case's own."""
        nats = self.case.model != OWN or is_cross_entropy((yield from reference_ledger()))
        return (yield from loss_of(self._arms, nats, steps))

    def _memory(self, _: float | None) -> Asking[Answer]:
        yield from reference_ledger()
        evidence = yield from memory_of()
        ledgers = yield from self._ledgers()
        stored = [] if self._settings.update else self._stored("memory_ratio")[:1]
        decision = unless_unlike(self._stored_now(check_memory(evidence, *stored)), ledgers)
        rows: list[Row] = [("memory_ratio", [decision.numbers["ratio"]], None)]
        if (held := decision.numbers["activation_ratio"]) is not None:
            rows.append(("activation_ratio", [held], None))
        return decision, rows

    def _checkpoints(self, _: float | None) -> Asking[Answer]:
        return check_checkpoints((yield from transfers_of(self._arms))), []

    def _speedup(self, floor: float | None) -> Asking[Answer]:
        """``floor``: the speedup over BF16 to exceed; ``None``: the stored baseline is asked."""
        decision, rows = yield from self.speed_question.decide(floor)
        ledgers = yield from self._ledgers()
        return unless_unlike(self._stored_now(decision), ledgers), rows

    def _proved(self, advice: pays.Advice) -> pays.Proof:
        arms = beside_another(self._arms, advice.recipe, advice.leave)
        try:
            return arms.run(lambda: pays.proof_of(arms, advice.leave))
        finally:
            arms.pool.renew(*arms.pair)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _decide(self, name: str, given: float | None = None) -> Decision:
        asked_as = "speedup" if name == "faster" else name
        if asked_as in ON_A_GPU and not self.case.asks(asked_as):
            return self._note(name, cannot(self.case, asked_as))
        decision, rows = self.evidence(lambda: getattr(self, f"_{asked_as}")(given), asked_as)
        if asked_as == "speedup":
            self.notes.facts(timing=self.speed_question.timer.recording())
        if name == "speedup" and self._compare_with_base is not None:
            from pytest_fp8.compare import with_base

            compared = self._arms.once(f"base {self.case.tolerance}", self._compare_with_base)
            decision = with_base(decision, compared)
        return self._note(name, decision, rows)

    def _before(self, question: str) -> None:
        """Ask what the session will ask of arms that take turns; elsewhere time them before a question profiles or
        hooks them, where this session may ask for the speed: a process that was profiled once may be slower
        (docs/limits.md). Raises ``ArmError``."""
        self.used = True
        if self._asked and self._arms.takes_turns:
            if self._gathered is None:
                self._gathered = self._arms.gather(self._tasks())
            if question in self._gathered:
                raise self._gathered[question]
        elif self._time_first and question not in UNPROFILED:
            self._arms.run(self.speed_question.first_timing)

    def _tasks(self) -> dict[str, Begin[Any]]:
        """What this session's tests will ask, the timing first: it must see a process that was not profiled. A question
        that no mark names asks for itself."""
        tasks: dict[str, Begin[Any]] = {"speedup": self._first_look}
        tasks |= {name: partial(getattr(self, f"_{name}"), None) for name in QUESTIONS if name != "speedup"}
        asked = {name: task for name, task in tasks.items() if name in self._asked}
        # Last, while the reference is there: what most questions ask of it once they have their own.
        return {**asked, "reference ledger": reference_ledger}

    def _first_look(self) -> Asking[None]:
        """Of the speed. Further ones are asked where a test's question is left open."""
        yield from self.speed_question.first_timing()
        yield from self._ledgers()

    def _stored_now(self, decision: Decision) -> Decision:
        """In an update a decision for which there was no baseline passes: this run stores one."""
        if not self._settings.update or decision.verdict is not Verdict.NOT_EXERCISED:
            return decision
        return passed(decision.seen + "; stored").answer(decision.question, decision.figures)

    def _require(self, question: str, decide: Callable[[], Decision]) -> Decision:
        try:
            decision = decide()
        except Fp8Error as error:
            self.notes.error(question, error)
            raise error.with_traceback(None) from None
        self.notes.asserted(question)
        if decision.verdict is Verdict.FAIL or (self._settings.strict and not decision.verdict.passes):
            raise CheckFailed(decision.message, decision.verdict)
        return decision

    def _note(self, question: str, decision: Decision, rows: Iterable[Row] = ()) -> Decision:
        self.used = True
        stored = self.case.backend != "bf16"
        metrics = {name: (values, tolerance) for name, values, tolerance in rows if values and stored}
        self.notes.answer(question, decision, metrics)
        return decision

    def _history(self, metric: str) -> list[list[Any]]:
        return self.baseline.history(metric) if self.baseline is not None else []

    def _stored(self, metric: str) -> list[Any]:
        return self.baseline.values(metric) if self.baseline is not None else []


UNPROFILED = ("speedup", "memory", "checkpoints")
"""Questions whose requests leave a process as fast as it was."""
