"""Processes for arms on a GPU that were started ahead, so that their imports delay nothing later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fp8.arms.process import ArmProcess
    from pytest_fp8.arms.spec import ArmSpec

MOST_SPARES = 2
"""One for BF16 and one for FP8, as a fresh pair needs. Each keeps its imported libraries in memory while it waits."""


class Spares:
    """Waiting processes, by the backend whose library they have imported."""

    def __init__(self) -> None:
        self._waiting: dict[str, ArmProcess] = {}

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._waiting.values()}

    def start(self, soon: Iterable[ArmSpec], process: Callable[[str], ArmProcess]) -> None:
        """Start processes for arms that may be built next."""
        for spec in soon:
            backend = spec.case.backend
            alone = spec.device == "cuda" and spec.case.gpus == 1
            if alone and backend not in self._waiting and len(self._waiting) < MOST_SPARES:
                self._waiting[backend] = process(backend)

    def take(self, backend: str) -> ArmProcess | None:
        spare = self._waiting.pop(backend, None)
        if spare is None or spare.alive:
            return spare
        spare.close()
        return None

    def close(self) -> None:
        for spare in self._waiting.values():
            spare.close()
        self._waiting.clear()
