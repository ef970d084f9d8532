"""One arm as a pair sees it: what it is, and how it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pytest_fp8.arms.process import REQUEST_SECONDS, ArmProcess
from pytest_fp8.arms.residence import Residences
from pytest_fp8.arms.sequence import Seen, Sequences
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.arms.stopwatch import Stopwatch
from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

TIMED = ("blocks", "busy", "call")
"""What is asked while nothing is built: times, and a user's own function, which may take some."""
PROFILED = "layers"
"""What gives kernels' times besides: they count where the case is asked for its speed."""


class Pool(Protocol):
    """The pool, as far as an arm needs it."""

    @property
    def stopwatch(self) -> Stopwatch: ...

    @property
    def residences(self) -> Residences: ...

    @property
    def sequences(self) -> Sequences: ...

    def facts_of(self, arm: Arm) -> dict[str, Any]: ...

    def live(self, arm: Arm) -> ArmProcess: ...

    def takes_turns(self, arm: Arm) -> bool: ...

    def renew(self, *arms: Arm) -> None: ...

    def be_quiet(self) -> None: ...


@dataclass(frozen=True)
class Arm:
    """One arm as a pair sees it. It is built when it is asked something and is not alive."""

    key: str
    spec: ArmSpec
    pool: Pool = field(repr=False)
    environment: ArmEnvironment | None = None
    """Another interpreter or checkout than this session's: one side of a comparison."""

    @property
    def label(self) -> str:
        """How it is named where its time is told: ``8b-bf16``, ``8b-te-current@base``."""
        return self.spec.case.id + (f"@{self.environment.name}" if self.environment is not None else "")

    @property
    def facts(self) -> dict[str, Any]:
        """What the arm reported when it was last built: versions, sizes, seconds. Empty before its first build."""
        return self.pool.facts_of(self)

    def request(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Ask the arm and wait ``timeout`` seconds for its answer. Raises :class:`ArmError`."""

        seen = self.pool.sequences.current()

        def ask() -> Any:
            with self._named():
                process = self._next(seen)
                if operation in TIMED or (operation == PROFILED and self.spec.case.asks("speedup")):
                    self.pool.be_quiet()
                with self.pool.stopwatch.clock(self.label, operation):
                    return process.request(operation, timeout, **arguments)

        return self.pool.residences.ask(self, ask)

    @contextlib.contextmanager
    def asked(self, operation: str, timeout: float = REQUEST_SECONDS, **arguments: Any) -> Iterator[Callable[[], Any]]:
        """Ask the arm and let it work while the block runs. The function that this gives waits for the answer; it
        raises :class:`ArmError`. For arms that are alive side by side.

        If the block ends without that call, the arm is closed: the late answer must not be read as another one's.
        """
        with self._named():
            process = self._next(self.pool.sequences.current())
        process.send(operation, **arguments)
        received = False

        def answer() -> Any:
            nonlocal received
            received = True
            with self._named(), self.pool.stopwatch.clock(self.label, operation):
                return process.receive(timeout)

        try:
            yield answer
        finally:
            if not received:
                process.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """What fails inside the block is this arm's."""
        try:
            yield
        except ArmError as error:
            error.arm = error.arm or self.key
            raise

    def _next(self, seen: Seen | None) -> ArmProcess:
        process = self.pool.live(self)
        self.pool.sequences.note(seen, self.key, process, alone=self.pool.takes_turns(self))
        return process

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Run ``function(model)`` on the live model inside the arm's process and give its result. Both travel as
        pickles. A result with torch tensors in it imports torch in pytest's process."""
        from pytest_fp8.shipping import ship, unship
        from pytest_fp8.workload import require_function

        require_function("what call() was given", "function", function, ("model",))
        return unship(self.request("call", function=ship(function, "the function")))
