"""What a test asks: ``fp8_pair``. Each question gathers its evidence once, judges it, and notes it for the record.

``fp8_pair.loss()`` gives the decision; ``fp8_pair.assert_loss()`` also fails the test where the verdict says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_fp8.arms.arm import Arm
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.case import OWN, Case, field_value
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.options import FRESH_PAIRS, Settings
from pytest_fp8.questions.again import look_again
from pytest_fp8.questions.checkpoints.carry import transfers_of
from pytest_fp8.questions.checkpoints.check import check_checkpoints
from pytest_fp8.questions.checkpoints.evidence import Transfer
from pytest_fp8.questions.gathering import Gathering, tasks_of
from pytest_fp8.questions.layers.check import COUNTED, LayersFigures, check_layers, strictly
from pytest_fp8.questions.layers.evidence import LayersEvidence, fp8_layers
from pytest_fp8.questions.ledger.compare import blame_in_ledger, unless_unlike
from pytest_fp8.questions.ledger.evidence import TwoLedgers, ledgers_of, reference_ledger
from pytest_fp8.questions.loss.check import LossFigures, check_loss, judge_gap
from pytest_fp8.questions.loss.evidence import LossEvidence, is_cross_entropy, loss_looks
from pytest_fp8.questions.loss.first_step import with_moved_first_losses, with_rounding
from pytest_fp8.questions.loss.restart import with_doubt
from pytest_fp8.questions.memory import MemoryEvidence, check_memory, memory_of
from pytest_fp8.questions.numerics.check import check_numerics
from pytest_fp8.questions.numerics.draws import with_further_draws
from pytest_fp8.questions.numerics.evidence import NumericsEvidence, numerics_of
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.question import SpeedQuestion
from pytest_fp8.questions.unanswered import cannot, not_held
from pytest_fp8.report.record import CaseNotes
from pytest_fp8.stats.components import MEASURED, Components
from pytest_fp8.stats.looks import GATED_CASES
from pytest_fp8.stats.loss import LossGap
from pytest_fp8.verdicts import CheckFailed, Decision, Verdict, passed

if TYPE_CHECKING:
    from pytest_fp8.compare.session import Comparison

__tracebackhide__ = True
"""For pytest: a failure is the user's line, not one of this module's."""


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
        time_first: bool = True,
        components: Components = MEASURED,
        host_bound: bool = False,
        compare_with_base: Callable[[], Comparison] | None = None,
        asked: Collection[str] = (),
    ) -> None:
        """``time_first``: whether this session may ask for the speed, which is then measured first. ``asked``: what its
        tests are known to ask. ``compare_with_base``: times base's FP8 arm beside this one; ``None`` where no base was
        named. ``host_bound``: whether a stored session is."""
        self.case: Case = arms.case
        self.baseline = baseline
        self._arms, self._settings, self.notes = arms, settings, notes
        pairs = FRESH_PAIRS if settings.update else None
        speed = SpeedQuestion(arms, host_bound, self._history, components, baseline_file, gated_cases, pairs)
        self._speed_question = speed
        self._compare_with_base = compare_with_base
        self._time_first = time_first and self.case.asks("speedup")
        twin = not self._stored("loss_twin_gap")
        self._gathering = Gathering(arms, asked, lambda: tasks_of(arms, speed.first_timing, self._look_at_loss, twin))
        self._metrics: dict[str, tuple[list[Any], float | None]] = {}
        speed.timer.on_pair = notes.timed

    @property
    def bf16(self) -> Arm:
        self.used = True
        return self._arms.bf16

    @property
    def fp8(self) -> Arm:
        self.used = True
        return self._arms.fp8

    def start(self, then: Iterable[Arm] = ()) -> None:
        """Have both arms alive, and processes for the next case on their way (:meth:`TwoArms.start`)."""
        self._arms.start(then)

    # -- evidence -------------------------------------------------------------------------------------------------

    def layers_evidence(self) -> LayersEvidence:
        self._before("layers")
        return fp8_layers(self._arms)

    def numerics_evidence(self) -> NumericsEvidence:
        self._before("numerics")
        return with_further_draws(self._arms, numerics_of(self._arms))

    def loss_evidence(self) -> LossEvidence:
        """Curves for the case's seeds, and for further ones while these do not decide."""
        return self._loss_looks()[0]

    def timing_evidence(self, look: int = 0) -> TimingEvidence:
        """The evidence of one look of :data:`pytest_fp8.stats.looks.GATE`."""
        self._before("speedup", profiles=False)
        evidence = self._speed_question.timing(look)
        self.notes.timed(self._speed_question.timer.recording())
        return evidence

    def ledgers(self) -> TwoLedgers:
        """What both arms did in one instrumented step besides FP8."""
        self._before("ledger")
        return ledgers_of(self._arms, self.case.backend)

    def memory_evidence(self) -> MemoryEvidence:
        self._before("memory", profiles=False)
        return memory_of(self._arms)

    def checkpoint_evidence(self) -> list[Transfer]:
        self._before("checkpoints", profiles=False)
        return transfers_of(self._arms)

    # -- decisions ------------------------------------------------------------------------------------------------

    def layers(self) -> Decision:
        """Is FP8 really running: every Linear accounted for, every product executed, the recipe in force."""
        counts = {name: self._stored(name)[0] for name in COUNTED if self._stored(name)}
        evidence = self.layers_evidence()
        decision = check_layers(self.case, evidence, self._stored("fp8_share"), counts, self.ledgers())
        if self._settings.strict:
            decision = strictly(decision, evidence)
        figures = decision.figures
        assert isinstance(figures, LayersFigures)
        self._measured("fp8_share", [figures.fp8_share])
        for name, count in figures.counted().items():
            self._measured(name, [count])
        return self._note(decision)

    def numerics(self) -> Decision:
        """Does FP8 compute what it should: operand formats, each layer's products, gradients against BF16's."""
        layers = self.layers_evidence()
        decision = check_numerics(self.case, self.numerics_evidence(), layers)
        return self._note(blame_in_ledger(decision, self.ledgers()) if decision.verdict is Verdict.FAIL else decision)

    def loss(self) -> Decision:
        """Is the loss still right: curves of several seeds against BF16's."""
        evidence, gap = self._loss_looks()
        decision = check_loss(evidence, self._stored("loss_twin_gap"), gap)
        figures = decision.figures
        assert isinstance(figures, LossFigures)
        self._measured("loss_gap", list(figures.gaps), figures.margin)
        self._measured("loss_twin_gap", list(figures.twin_gaps) or self._stored("loss_twin_gap"), figures.margin)
        return self._note(unless_unlike(decision, self.ledgers()))

    def faster(self, floor: float | None = None) -> Decision:
        """Is FP8 faster than BF16 by the floor: ``floor`` times, by default the case's own."""
        bound = self.case.floor if floor is None else field_value("floor", floor)
        return self._speed("faster", bound)

    def speedup(self) -> Decision:
        """Is the speedup still that of the stored baseline. The floor is the question of :meth:`faster`."""
        return self._speed("speedup", None)

    def memory(self) -> Decision:
        """What does it cost in memory: peaks of one training step."""
        if not self.case.asks("memory"):
            return self._note(cannot(self.case, "memory"))
        stored = [] if self._settings.update else self._stored("memory_ratio")[:1]
        decision = self._stored_now(check_memory(self.memory_evidence(), *stored))
        decision = unless_unlike(decision, self.ledgers())
        self._measured("memory_ratio", [decision.numbers["ratio"]])
        if (held := decision.numbers["activation_ratio"]) is not None:
            self._measured("activation_ratio", [held])
        return self._note(decision)

    def checkpoints(self) -> Decision:
        """Can I switch back: checkpoints carried both ways."""
        return self._note(check_checkpoints(self.checkpoint_evidence()))

    # -- assertions -----------------------------------------------------------------------------------------------

    def assert_layers(self) -> Decision:
        """Fail the test where :meth:`layers` says FAIL; under ``--fp8-strict``, unless it says PASS or IMPROVED."""
        return self._require("layers", self.layers)

    def assert_numerics(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`numerics`."""
        return self._require("numerics", self.numerics)

    def assert_loss(self) -> Decision:
        """As :meth:`assert_layers`, of :meth:`loss`."""
        return self._require("loss", self.loss)

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

    # -- inside ---------------------------------------------------------------------------------------------------

    def _loss_looks(self) -> tuple[LossEvidence, LossGap]:
        self._before("loss")
        return self._look_at_loss()

    def _look_at_loss(self) -> tuple[LossEvidence, LossGap]:
        frozen = self._stored("loss_twin_gap")
        nats = self.case.model != OWN or is_cross_entropy(reference_ledger(self._arms))

        def look() -> tuple[LossEvidence, LossGap]:
            judge = partial(judge_gap, frozen_margin=frozen)
            looks = with_rounding(self._arms, loss_looks(self._arms, twin=not frozen, nats=nats), judge)
            evidence, _ = look_again(looks, lambda each: with_doubt(judge(each), each))
            return with_moved_first_losses(self._arms, evidence), judge(evidence)

        return self._arms.once("loss", look)

    def _before(self, question: str, profiles: bool = True) -> None:
        """Gather what the session will ask of arms that take turns; elsewhere time them before a question ``profiles``
        or hooks them, where this session may ask for the speed: a process that was profiled once may be slower
        (docs/limits.md). Raises ``ArmError``."""
        self.used = True
        if not self._gathering.has(question) and profiles and self._time_first and not self._gathering.gathered:
            self._speed_question.first_timing()

    def _speed(self, question: str, floor: float | None) -> Decision:
        """``floor``: the speedup over BF16 to exceed; ``None``: the stored baseline is asked."""
        if not self.case.asks("speedup"):
            return self._note(cannot(self.case, "speedup"), question)
        self._before("speedup", profiles=False)
        decision, rows = self._speed_question.decide(floor)
        self.notes.timed(self._speed_question.timer.recording())
        for row in rows:
            self._measured(*row)
        decision = unless_unlike(self._stored_now(decision), self.ledgers())
        if self._compare_with_base is not None and floor is None:
            from pytest_fp8.compare.gate import with_base

            decision = with_base(decision, self._arms.once(f"base {self.case.tolerance}", self._compare_with_base))
        return self._note(decision, question)

    def _stored_now(self, decision: Decision) -> Decision:
        """In an update a decision for which there was no baseline passes: this run stores one."""
        if not self._settings.update or decision.verdict is not Verdict.NOT_EXERCISED:
            return decision
        return passed(decision.seen + "; stored").answer(decision.question, decision.figures)

    def _require(self, question: str, decide: Callable[[], Decision]) -> Decision:
        try:
            decision = decide()
        except Fp8Error as error:
            if error.code is not R.TOO_LARGE:
                self.notes.error(question, error)
                raise error.with_traceback(None) from None
            decision = self._note(not_held(question, error))
        answer = self.notes.asserted(question)
        if decision.verdict is Verdict.FAIL or (self._settings.strict and not decision.verdict.passes):
            raise CheckFailed(decision.message, decision.verdict, told=answer)
        return decision

    def _note(self, decision: Decision, as_question: str = "") -> Decision:
        self.used = True
        self.notes.answer(as_question or decision.question, decision, self._metrics)
        self._metrics = {}
        return decision

    def _measured(self, metric: str, values: list[Any], tolerance: float | None = None) -> None:
        if values and self.case.backend != "bf16":
            self._metrics[metric] = values, tolerance

    def _history(self, metric: str) -> list[list[Any]]:
        return self.baseline.history(metric) if self.baseline is not None else []

    def _stored(self, metric: str) -> list[Any]:
        return self.baseline.values(metric) if self.baseline is not None else []
