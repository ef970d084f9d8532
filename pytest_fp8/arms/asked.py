"""What one process and several ranks have in common: they are asked one thing after another, and answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pytest_fp8.arms.spec import ArmSpec

BUILD_SECONDS = 420.0
REQUEST_SECONDS = 300.0


class Asked(ABC):
    """Each request has its answer before the next one is made."""

    def __init__(self) -> None:
        self.name = "an arm"
        self._asked, self._answer_due = "", False

    @abstractmethod
    def start_build(self, spec: ArmSpec) -> None:
        """Ask to become this arm; :meth:`receive` waits for it. Two arms can build at the same time."""

    @abstractmethod
    def send(self, operation: str, **arguments: Any) -> None:
        """Send one request without waiting. Raises ``RuntimeError`` where the last request has no answer yet."""

    @abstractmethod
    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        """Wait ``timeout`` seconds for the answer to the last request. Raises :class:`ArmError`."""

    def build(self, spec: ArmSpec, timeout: float = BUILD_SECONDS) -> dict[str, Any]:
        """Become this arm; gives what it says of itself. Raises :class:`ArmError`."""
        self.start_build(spec)
        answer: dict[str, Any] = self.receive(timeout)
        return answer

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Send one request and wait ``timeout`` seconds for its answer.

        Raises :class:`ArmError`. The process is then gone, except after an exception inside the arm: it can still
        answer.
        """
        self.send(operation, **arguments)
        return self.receive(timeout)

    def _note_asked(self, operation: str) -> None:
        if self._answer_due:
            raise RuntimeError(f"{self.name!r} was asked to {operation!r} before it answered to {self._asked!r}")
        self._asked, self._answer_due = operation, True
