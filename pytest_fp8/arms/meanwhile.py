"""Builds of arms for later cases, which go on while those of today's case answer what is not timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.arm import Arm
    from pytest_fp8.arms.ranks import AnyProcess

MOST = 5
"""Builds at a time. Each compiles on several cores and reads its libraries, and delays the arms that are asked."""


PATIENCE_SECONDS = 180.0
"""How long a test waits for a build of another test's arm. It then ends, and that test builds it again and tells."""


class Meanwhile:
    """Builds that were begun and not waited for, in the order in which they were begun."""

    def __init__(self, waiting: Callable[[Arm], AbstractContextManager[None]]) -> None:
        """``waiting``: notes the time that its block waits for an arm's build."""
        self._waiting = waiting
        self._begun: dict[str, tuple[Arm, AnyProcess]] = {}
        self._tried: set[str] = set()
        """Keys of arms that are not begun again. Where one could not be built, its own test builds it and says why."""

    @property
    def pids(self) -> set[int]:
        return {pid for _, process in self._begun.values() for pid in process.pids}

    @property
    def arms(self) -> list[Arm]:
        return [arm for arm, _ in self._begun.values()]

    @property
    def done(self) -> list[Arm]:
        """Those whose build waits for nothing any more."""
        return [arm for arm, process in self._begun.values() if process.has_answered]

    def wants(self, arm: Arm) -> bool:
        """Whether this arm's build may begin: it was not tried before, and not too many are under way."""
        return arm.key not in self._tried and len(self._begun) - len(self.done) < MOST

    def begin(self, arm: Arm, start: Callable[[Arm], AnyProcess]) -> None:
        """``start`` gives its process, which builds."""
        self._tried.add(arm.key)
        try:
            self._begun[arm.key] = arm, start(arm)
        except ArmError:
            return

    def finish(self, arms: Collection[str]) -> Iterator[tuple[Arm, AnyProcess, dict[str, Any]]]:
        """Wait for the builds of these keys; gives each arm, its process and what it says of itself. One that failed
        ends and is not among them."""
        for key in [key for key in self._begun if key in arms]:
            arm, process = self._begun.pop(key)
            try:
                with self._waiting(arm):
                    facts = process.receive(PATIENCE_SECONDS)
            except ArmError:
                process.close()
            else:
                yield arm, process, facts

    def stop_rehearsals(self) -> None:
        """End those that are not done; they begin anew later, and find what the compilers have finished."""
        for key, (arm, process) in list(self._begun.items()):
            if arm.spec.rehearses and not process.has_answered:
                self._tried.discard(key)
                self._begun.pop(key)
                process.close()

    def keep(self, keys: Collection[str]) -> None:
        """End the builds of all other arms."""
        for key in self._begun.keys() - set(keys):
            self._tried.discard(key)
            self._begun.pop(key)[1].close()
