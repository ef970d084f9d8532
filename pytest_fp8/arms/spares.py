"""Processes for arms on GPUs that were started ahead, so that their imports delay nothing later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.process import ArmProcess
    from pytest_fp8.arms.spec import ArmSpec

MOST_SPARES = 3
"""Processes: for BF16, for the next case's backend and for a fresh one of this case's; of cases on several GPUs those
of two arms. Each keeps its imported libraries in memory while it waits."""
IMPORT_SECONDS = 90.0
"""How long imports may take that something timed waits for. From a cold disk they took 30 s."""
LOOK_SECONDS = 0.05


class Spares:
    """Waiting processes, by the backend whose library they have imported and the number of their ranks."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], ArmProcess] = {}
        self._too_slow: set[tuple[str, int]] = set()
        """What is started ahead no more, since its imports took too long."""
        self.skipped: list[str] = []
        """Why processes were not started ahead, or ended before they were wanted."""

    @property
    def pids(self) -> set[int]:
        return {pid for process in self._waiting.values() for pid in process.pids}

    def start(self, soon: Iterable[ArmSpec], fresh: Callable[[ArmSpec], ArmProcess]) -> None:
        """Start processes for arms that may be built next; those that wait for others end."""
        soon = list(soon)
        for kind in self._waiting.keys() - {_kind(spec) for spec in soon}:
            self._waiting.pop(kind).close()
        for spec in soon:
            waiting, ranks = sum(ranks for _, ranks in self._waiting), spec.case.gpus
            room = waiting + ranks <= max(MOST_SPARES, 2 * ranks)
            if spec.device == "cuda" and room and _kind(spec) not in self._waiting.keys() | self._too_slow:
                try:
                    self._waiting[_kind(spec)] = fresh(spec)
                except ArmError as error:
                    # It is started when it is wanted, and its own test tells why it cannot be.
                    self.skipped.append(error.headline)
                    return

    @property
    def importing(self) -> bool:
        """Whether one still imports its libraries."""
        return not all(process.has_imported for process in self._waiting.values())

    def wait(self) -> None:
        """Until none imports any more: imports may hold up the hosts of arms that are timed. One that takes too long
        ends, and its kind is started when it is wanted from then on."""
        deadline = time.monotonic() + IMPORT_SECONDS
        while self.importing and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        for kind in [kind for kind, process in self._waiting.items() if not process.has_imported]:
            self._too_slow.add(kind)
            self.skipped.append(f"a process for {kind[0]} had not imported its libraries after {IMPORT_SECONDS:.0f} s")
            self._waiting.pop(kind).close()

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
