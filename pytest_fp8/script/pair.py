"""What a test asks of two runs of a user's script: the questions of a pair, of evidence that a script can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pytest_fp8.arms.pool import Arm
from pytest_fp8.pair import Fp8Pair
from pytest_fp8.plan import FP8, REFERENCE, Ask, Asking
from pytest_fp8.questions.ledger.evidence import TwoLedgers
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence
from pytest_fp8.script.command import LEAST_SEEDS, Script
from pytest_fp8.script.judge import check_losses, check_presence, in_common
from pytest_fp8.verdicts import Decision


class Fp8Script(Fp8Pair):
    """Both runs of a script. ``bf16`` and ``fp8`` are the held processes."""

    script: Script
    _judge_losses = staticmethod(check_losses)
    _least_seeds = LEAST_SEEDS

    def _ledgers(self) -> Asking[TwoLedgers]:
        return in_common((yield from super()._ledgers()))

    def _presence(self, ledgers: TwoLedgers, stored: Mapping[str, float]) -> Asking[Decision]:
        bf16, fp8 = yield Ask(REFERENCE, "presence"), Ask(FP8, "presence")
        return check_presence(bf16, fp8, ledgers, self.script.share, stored)

    def loss_evidence(self, steps: int = 0) -> Asking[LossEvidence]:
        """The first ``steps`` losses of both runs, as many as the case says where that is 0; of further seeds where the
        mark says how a seed is set."""
        curves: dict[str, dict[int, Curve]] = {REFERENCE: {}, FP8: {}}
        seeds = range(self.case.seeds) if self.script.seed else range(1)
        for seed in seeds:
            names = self._seeded(seed) if self.script.seed else {arm: arm for arm in curves}
            told = yield tuple(Ask(name, "losses", steps=steps or self.case.steps) for name in names.values())
            for (arm, name), losses in zip(names.items(), told, strict=True):
                curves[arm][seed] = Curve(seed, losses, [0.0] * len(losses))
                if self.script.seed:
                    self._arms.pool.renew(self._arms.arms[name])
        return LossEvidence(curves[FP8], curves[REFERENCE])

    def _seeded(self, seed: int) -> dict[str, str]:
        """The arms of a seed, by the arms that leave them the GPU."""
        names = {}
        for arm in (REFERENCE, FP8):
            base, name = self._arms.arms[arm], f"{arm}, seed {seed}"
            spec = replace(base.spec, workload=replace(self.script, number=seed).to_text())
            self._arms.arms.setdefault(name, Arm(f"{base.key}-seed{seed}", spec, base.pool))
            self._arms.pool.renew(base)
            names[arm] = name
        return names
