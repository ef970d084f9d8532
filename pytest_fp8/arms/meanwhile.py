"""Builds of arms for later cases, which go on while those of today's case answer what is not timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.arm import Arm
    from pytest_fp8.arms.ranks import AnyProcess

MOST = 5
"""Builds at a time. Each compiles on several cores and reads its libraries, and delays the arms that are asked."""
PATIENCE_SECONDS = 180.0
"""How long a build may take that a test of another arm waits for. It then ends, and its own test builds it again and
tells."""


class Begun(NamedTuple):
    arm: Arm
    process: AnyProcess
    at: float
    """Seconds of a clock that never goes back."""


class Meanwhile:
    """Builds that were begun and not waited for, in the order in which they were begun."""

    def __init__(self, waiting: Callable[[Arm], AbstractContextManager[None]]) -> None:
        """``waiting``: notes the time that its block waits for an arm's build."""
        self._waiting = waiting
        self._begun: dict[str, Begun] = {}
        self._tried: set[str] = set()
        """Keys of arms that are not begun again. Where one could not be built, its own test builds it and says why."""

    @property
    def pids(self) -> set[int]:
        return {pid for each in self._begun.values() for pid in each.process.pids}

    @property
    def arms(self) -> list[Arm]:
        return [each.arm for each in self._begun.values()]

    @property
    def done(self) -> list[Arm]:
        """Those whose build waits for nothing any more."""
        return [each.arm for each in self._begun.values() if each.process.has_answered]

    def wants(self, arm: Arm) -> bool:
        """Whether this arm's build may begin: it was not tried before, and not too many are under way."""
        return arm.key not in self._tried and len(self._begun) - len(self.done) < MOST

    def begin(self, arm: Arm, start: Callable[[Arm], AnyProcess]) -> None:
        """``start`` gives its process, which builds."""
        self._tried.add(arm.key)
        try:
            self._begun[arm.key] = Begun(arm, start(arm), time.monotonic())
        except ArmError:
            return

    def finish(
        self, arms: Collection[str], limit: float = PATIENCE_SECONDS
    ) -> Iterator[tuple[Arm, AnyProcess, dict[str, Any]]]:
        """Wait for the builds of these keys, until ``limit`` seconds after each began; gives each arm, its process and
        what it says of itself. One that failed ends and is not among them."""
        for key in [key for key in self._begun if key in arms]:
            arm, process, at = self._begun.pop(key)
            try:
                with self._waiting(arm):
                    facts = process.receive(max(1.0, at + limit - time.monotonic()))
            except ArmError:
                process.close()
            else:
                if not arm.spec.rehearses:
                    self._tried.discard(key)
                yield arm, process, facts

    def stop_rehearsals(self) -> None:
        """End those that are not done; they begin anew later, and find what the compilers have finished."""
        for arm, process, _ in list(self._begun.values()):
            if arm.spec.rehearses and not process.has_answered:
                self._end(arm.key)

    def keep(self, keys: Collection[str]) -> None:
        """End the builds of all other arms."""
        for key in self._begun.keys() - set(keys):
            self._end(key)

    def _end(self, key: str) -> None:
        self._tried.discard(key)
        self._begun.pop(key).process.close()
