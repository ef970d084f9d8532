"""Two arms that a test answers for, one request after another; and a pair that is asked for loss curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pytest_fp8 import Case
from pytest_fp8.plain import to_plain
from pytest_fp8.plan import TwoArms
from pytest_fp8.questions.loss.check import loss_of
from pytest_fp8.questions.loss.evidence import Curve, LossEvidence


class StandIn(TwoArms):
    """``reference`` and ``fp8`` have a ``request`` as arms do, and ``facts`` where something reads them."""

    def __init__(self, case: Any, reference: Any, fp8: Any = None) -> None:
        pool: Any = SimpleNamespace(
            cache={},
            gpu=None,
            deaths={},
            is_alive=lambda arm: True,
            live=lambda arm: arm,
            takes_turns=lambda arm: False,
            tight=lambda *arms, recorded=False: True,
        )
        arms: Any = [
            SimpleNamespace(
                key=name,
                pid=name,
                spec=SimpleNamespace(device="cpu"),
                request=lambda operation, arm=arm, **how: arm.request(operation, **how),
                facts=getattr(arm, "facts", {}),
            )
            for name, arm in (("reference", reference), ("fp8", fp8))
        ]
        super().__init__(case, pool, *arms)


Losses = Callable[..., Sequence[float]]


class CurvePair:
    """Arms whose losses two functions give, of ``seed`` and ``steps``, ``jitter`` and ``noise``; ``asked`` notes arm,
    seed and steps, and jitter and noise."""

    def __init__(self, fp8: Losses, bf16: Losses, seeds: int = 3, **of_fp8: Any) -> None:
        self.case = Case("own", "torchao", "tensorwise", emulated=True, seeds=seeds)
        self.asked: list[Any] = []
        self.fp8 = CurveArm(self.asked, "fp8", fp8, of_fp8)
        self.bf16 = CurveArm(self.asked, "bf16", bf16, {})

    def evidence(self, nats: bool = True, steps: int = 0) -> LossEvidence:
        """What is asked of these arms until their curves decide."""
        arms = StandIn(self.case, self.bf16, self.fp8)
        return arms.run(lambda: loss_of(arms, nats, steps))

    def noisy(self) -> list[tuple[int, int]]:
        """(seed, steps) of the reference's curves with noise."""
        return [(seed, steps) for _, seed, steps, _, noise in self.asked if noise is not None]


class CurveArm:
    def __init__(self, asked: list[Any], name: str, losses: Losses, more: dict[str, Any]) -> None:
        self.asked, self.name, self.losses, self.more = asked, name, losses, more

    def request(
        self, operation: str, seed: int, steps: int, jitter: bool = False, watch: bool = False, noise: int | None = None
    ) -> Any:
        assert operation == "curve"
        assert watch == (self.name == "fp8")
        self.asked.append((self.name, seed, steps, jitter, noise))
        losses = list(self.losses(seed, steps, jitter=jitter, noise=noise))
        return to_plain(Curve(seed, losses, [1.0 + (self.name == "fp8")] * steps, **self.more))
