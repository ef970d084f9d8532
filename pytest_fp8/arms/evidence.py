"""Two arms of one case, asked the questions: gathers evidence from the live arms, once each. Judging is elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pytest_fp8.arms.pool import Arm, ArmPool, cpu_threads
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.case import Case
from pytest_fp8.gpu import Conditions, conditions
from pytest_fp8.questions.carry import carry_both_ways
from pytest_fp8.questions.records import Curve, LayersEvidence, LossEvidence, MemoryEvidence, TimingEvidence, Transfer
from pytest_fp8.rules.decide import BASELINE_BLOCKS, LOOKS, MAX_LOSS_SEEDS, tail_gap
from pytest_fp8.rules.losses import compare_curves
from pytest_fp8.verdicts import Verdict

BLOCK_MS = 250.0
"""A block lasts at least this long: a pause of the host or a dip of the clocks is then a small part of it."""


class PairArms:
    """The two live arms of a case, and the evidence that was gathered from them."""

    def __init__(
        self,
        case: Case,
        pool: ArmPool,
        workload: str | None,
        fingerprint: str = "",
        fp8_control: str | None = None,
        reference_control: str | None = None,
    ) -> None:
        """``fp8_control``, ``reference_control``: the control that breaks the one arm or the other."""
        self.case, self.pool = case, pool
        self.fp8 = make_arm(case, pool, workload, fingerprint, fp8_control, own_process=case.backend == "bf16")
        self.bf16 = make_arm(case.reference(), pool, workload, fingerprint, reference_control)
        self._forget()

    @classmethod
    def between(cls, reference: Arm, other: Arm) -> PairArms:
        """Two arms that are not a case's own: one case in two environments, ``other`` in the FP8 arm's place."""
        pair = cls.__new__(cls)
        pair.case, pair.pool = other.spec.case, other.pool
        pair.bf16, pair.fp8 = reference, other
        pair._forget()
        return pair

    def _forget(self) -> None:
        self._timing: dict[str, list[list[float]]] = {"bf16": [], "fp8": []}
        self.seen_conditions: list[Conditions] = []
        """The GPU's clocks and neighbours, in the order taken: once per ABBA block; where the arms take turns, after
        each of the three."""
        self._layers: LayersEvidence | None = None
        self._ahead: list[Arm] = []

    def start(self, ahead: Iterable[Arm] = ()) -> None:
        """Have both arms alive; ``ahead`` are the arms of cases still to come, built meanwhile where they fit."""
        self._ahead = list(ahead) or self._ahead
        self.pool.ensure(self.bf16, self.fp8, self._ahead)

    def renew(self) -> None:
        """Have fresh processes: those of before were profiled, which slows what the host launches."""
        self.pool.renew(self.fp8, self.bf16)
        self.start()

    # -- layers ---------------------------------------------------------------------------------------------------

    def layers(self) -> LayersEvidence:
        if self._layers is None:
            self._layers = self._layers_of(self.fp8)
        return self._layers

    def reference_layers(self) -> LayersEvidence:
        return self.shared("layers", lambda: self._layers_of(self.bf16))  # type: ignore[no-any-return]

    def _layers_of(self, arm: Arm) -> LayersEvidence:
        return LayersEvidence.from_json(arm.request("layers"), recompute=self.case.activation_checkpointing)

    # -- loss -----------------------------------------------------------------------------------------------------

    def losses(self, frozen_margin: list[float]) -> LossEvidence:
        """Curves for the case's seeds, and further ones while they do not decide."""
        evidence: dict[str, dict[int, Curve]] = {"fp8": {}, "bf16": {}, "twin": {}}
        seed = 0
        while True:
            for _ in range(self.case.seeds if seed == 0 else 1):
                self._curves(seed, evidence, twin=not frozen_margin)
                if self._settled(seed, evidence):
                    return LossEvidence(**evidence)
                seed += 1
            own = [tail_gap(evidence["twin"][s].losses, evidence["bf16"][s].losses) for s in evidence["twin"]]
            fp8, bf16 = ([evidence[arm][s].losses for s in evidence["fp8"]] for arm in ("fp8", "bf16"))
            verdict = compare_curves(fp8, bf16, frozen_margin or own).verdict
            if verdict is not Verdict.INCONCLUSIVE or seed >= MAX_LOSS_SEEDS:
                break
        return LossEvidence(**evidence)

    def _settled(self, seed: int, evidence: dict[str, dict[int, Curve]]) -> bool:
        """Whether no further seed can mend what this one shows: other data, or numbers that are not finite."""
        curves = [evidence[arm][seed] for arm in evidence if seed in evidence[arm]]
        finite = all(math.isfinite(x) for curve in curves for x in (*curve.losses, *curve.gradient_norms))
        return not finite or len({curve.data for curve in curves}) > 1

    def _curves(self, seed: int, into: dict[str, dict[int, Curve]], twin: bool) -> None:
        wanted = {"seed": seed, "steps": self.case.horizon}
        if self.pool.side_by_side(self.fp8, self.bf16):
            # Each keeps all its threads: the sums of a convolution depend on their number, and the time does not.
            with self.fp8.asked("curve", **wanted) as answer:
                reference = self._reference_curves(wanted, twin)
                into["fp8"][seed] = Curve.from_json(answer())
        else:
            into["fp8"][seed] = Curve.from_json(self.fp8.request("curve", **wanted))
            reference = self._reference_curves(wanted, twin)
        for name, curve in reference.items():
            into[name][seed] = curve

    def _reference_curves(self, wanted: dict[str, int], twin: bool) -> dict[str, Curve]:
        """What other cases have asked is not asked again."""

        def ask(jitter: bool) -> Curve:
            return Curve.from_json(self.bf16.request("curve", jitter=jitter, **wanted))

        curves = {"bf16": self.shared(f"curve {wanted['seed']}", lambda: ask(jitter=False))}
        if twin:
            curves["twin"] = self.shared(f"twin {wanted['seed']}", lambda: ask(jitter=True))
        return curves

    # -- speed ----------------------------------------------------------------------------------------------------

    def timing(self, look: int) -> TimingEvidence:
        """Blocks of ``LOOKS[look]``: a fresh pair of processes is added before blocks are."""
        processes, blocks = LOOKS[look]
        self.have_processes(processes, blocks)
        for index in range(processes):
            if len(self._timing["fp8"][index]) < 2 * blocks and index == processes - 1:
                self._extend(index, blocks - len(self._timing["fp8"][index]) // 2)
        mine, reference = self.layers(), self.reference_layers()
        seen = self.seen_conditions
        return TimingEvidence(
            bf16=[list(x) for x in self._timing["bf16"]],
            fp8=[list(x) for x in self._timing["fp8"]],
            throttles=sorted({word for state in seen for word in state.throttles}),
            strangers=sorted({pid for state in seen for pid in state.strangers}),
            clocks=sorted({state.clock for state in seen}),
            bf16_attention=reference.attention,
            fp8_attention=mine.attention,
            bf16_cudnn=self.bf16.facts.get("cudnn"),
            fp8_cudnn=self.fp8.facts.get("cudnn"),
            fp8_compiled=self.fp8.facts.get("compiled"),
            bf16_gpu=reference.milliseconds,
            fp8_gpu=mine.milliseconds,
        )

    def add_processes(self, processes: int, blocks: int = BASELINE_BLOCKS) -> TimingEvidence:
        """At least ``processes`` fresh pairs, for a baseline."""
        self.have_processes(processes, blocks)
        return self.timing(0)

    def have_processes(self, processes: int, blocks: int) -> None:
        """Measure fresh pairs until there are that many."""
        while len(self._timing["fp8"]) < processes:
            if self._timing["fp8"]:
                self.renew()
            self._timing["bf16"].append([])
            self._timing["fp8"].append([])
            self._extend(len(self._timing["fp8"]) - 1, blocks)

    def _extend(self, process: int, blocks: int) -> None:
        bf16, fp8 = self._timing["bf16"][process], self._timing["fp8"][process]
        if self.pool.takes_turns(self.fp8):
            first = self._run(self.bf16, blocks)
            self._look_around()
            fp8 += self._run(self.fp8, 2 * blocks)
            self._look_around()
            second = self._run(self.bf16, blocks)
            self._look_around()
            bf16 += [time for pair in zip(first, second, strict=True) for time in pair]
            return
        # ABBA ABBA ...: neighbouring turns of one arm become one request, which saves their dropped steps.
        # Arms that share the GPU at ease keep their memory between turns, so that no turn begins by growing it anew.
        for arm in (self.fp8, self.bf16):
            # The first steps after other questions are not like the later ones.
            self._run(arm, 3)
        bf16 += self._run(self.bf16, 1)
        for block in range(blocks):
            fp8 += self._run(self.fp8, 2)
            bf16 += self._run(self.bf16, 2 if block < blocks - 1 else 1)
            self._look_around()
        for arm in (self.fp8, self.bf16):
            arm.request("park")

    def _run(self, arm: Arm, count: int) -> list[float]:
        # The steps first: choosing them may build the reference, whose memory then counts.
        steps, tight = self.steps_per_block(), self._tight()
        times: list[float] = arm.request("blocks", count=count, steps=steps, dropped=dropped_steps(tight))
        if tight:
            arm.request("park")
        return times

    def _look_around(self) -> None:
        """Note the GPU's state; once an ABBA block at most, for the question itself lets the GPU stand idle."""
        if self.pool.gpu is not None:
            self.seen_conditions.append(conditions(self.pool.gpu, self.pool.pids))

    def block_times(self) -> dict[str, list[list[float]]]:
        """Milliseconds per step so far, by arm (``bf16``, ``fp8``) and process, in the order taken."""
        return {arm: [list(process) for process in processes] for arm, processes in self._timing.items()}

    def recording(self) -> dict[str, Any]:
        """Every timed block with the GPU's state around it: plain data, which ``benchmarks/gate`` fits its noise to."""
        states, times = self.seen_conditions, self.block_times()
        return {
            "steps_per_block": self.steps_per_block(),
            "dropped_steps": self.dropped_steps(),
            "order": "turns" if self.pool.takes_turns(self.fp8) else "abba",
            "processes": [{"bf16": b, "fp8": f} for b, f in zip(times["bf16"], times["fp8"], strict=True)],
            "clocks_mhz": [state.clock for state in states],
            "throttles": sorted({word for state in states for word in state.throttles}),
            "strangers": len({pid for state in states for pid in state.strangers}),
        }

    def steps_per_block(self) -> int:
        """Training steps in one block of either arm."""
        return int(self.shared("block steps", self._choose_steps))

    def dropped_steps(self) -> int:
        """Steps that are run and not counted when an arm's turn begins."""
        return dropped_steps(self._tight())

    def _tight(self) -> bool:
        return self.pool.tight(self.fp8, self.bf16)

    def _choose_steps(self) -> int:
        one: list[float] = self.bf16.request("blocks", count=1, steps=3, dropped=1)
        self.bf16.request("park")
        return max(1, math.ceil(BLOCK_MS / (0.75 * one[0])))

    # -- memory ---------------------------------------------------------------------------------------------------

    def memory(self) -> MemoryEvidence:
        fp8 = self.fp8.request("memory")
        return MemoryEvidence(bf16=self.shared("memory", lambda: self.bf16.request("memory")), fp8=fp8)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Transfer]:
        """Both directions through every store of the case."""
        return carry_both_ways(self)

    def shared(self, what: str, ask: Any) -> Any:
        """Evidence about the reference, asked once for all the cases that share it."""
        key = (self.bf16.key, what)
        if key not in self.pool.cache:
            self.pool.cache[key] = ask()
        return self.pool.cache[key]


def dropped_steps(tight: bool) -> int:
    """One more where arms give their memory back between turns, for it grows anew."""
    return 2 if tight else 1


def make_arm(
    case: Case,
    pool: ArmPool,
    workload: str | None,
    fingerprint: str,
    control: str | None = None,
    own_process: bool = False,
) -> Arm:
    """The arm of a case. Arms with one digest are one process: six cases of a model share one reference.

    BF16 measured against BF16 must be two processes all the same (``own_process``), and an arm that a control breaks
    is never shared with a healthy one.
    """
    on_cpu = case.emulated
    spec = ArmSpec(case, "cpu" if on_cpu else "cuda", workload, cpu_threads() if on_cpu else None, control)
    key = case.digest(fingerprint) + ("-twin" if own_process else "") + (f"-control-{control}" if control else "")
    return pool.arm(key, spec)
