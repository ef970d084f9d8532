"""Processes for arms on GPUs that were started ahead, so that their imports delay nothing later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.process import ArmProcess
    from pytest_fp8.arms.spec import ArmSpec

MOST = 3
"""Processes: for BF16, for the next case's backend and for a fresh one of this case's; of cases on several GPUs those
of two arms. Each keeps its imported libraries in memory while it waits."""
IMPORT_SECONDS = 90.0
"""How long imports may take that something timed waits for. From a cold disk they took 30 s."""
LOOK_SECONDS = 0.05


class Spares:
    """Waiting processes, by the backend whose library they have imported and the number of their ranks."""

    def __init__(self, fresh: Callable[[ArmSpec], ArmProcess]) -> None:
        self._fresh = fresh
        self._waiting: dict[tuple[str, int], ArmProcess] = {}
        self.skipped: list[str] = []
        """Why a process was not started ahead, or ended before it was wanted. Then no more are."""

    @property
    def pids(self) -> set[int]:
        return {pid for process in self._waiting.values() for pid in process.pids}

    @property
    def importing(self) -> bool:
        """Whether one still imports its libraries."""
        return not all(process.has_imported for process in self._waiting.values())

    def start(self, soon: Iterable[ArmSpec]) -> None:
        """Start processes for arms that may be built next; those that wait for others end."""
        wanted = {_kind(spec): spec for spec in soon if spec.device == "cuda" and not self.skipped}
        for kind in self._waiting.keys() - wanted.keys():
            self._waiting.pop(kind).close()
        for kind, spec in wanted.items():
            ranks = sum(ranks for _, ranks in {*self._waiting, kind})
            if kind in self._waiting or ranks > max(MOST, 2 * spec.case.gpus):
                continue
            try:
                self._waiting[kind] = self._fresh(spec)
            except ArmError as error:
                # It is started when it is wanted, and its own test tells why it cannot be.
                self.skipped.append(error.headline)
                return

    def wait(self) -> None:
        """Until none imports any more: imports may hold up the hosts of arms that are timed."""
        deadline = time.monotonic() + IMPORT_SECONDS
        while self.importing and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        if self.importing:
            self.skipped.append(f"a process had not imported its libraries after {IMPORT_SECONDS:.0f} s")
            self.close()

    def take(self, spec: ArmSpec) -> ArmProcess | None:
        spare = self._waiting.pop(_kind(spec), None)
        if spare is None or spare.alive:
            return spare
        spare.close()
        return None

    def close(self) -> None:
        for spare in self._waiting.values():
            spare.close()
        self._waiting.clear()


def _kind(spec: ArmSpec) -> tuple[str, int]:
    return spec.case.backend, spec.case.gpus
