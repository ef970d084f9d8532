"""Two arms that a test answers for, one request after another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pytest_fp8.plan import TwoArms


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
