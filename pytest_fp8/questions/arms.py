"""What a question may ask of the arms. The classes behind these protocols are in :mod:`pytest_fp8.arms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pytest_fp8.case import Case
from pytest_fp8.gpu import Conditions

T = TypeVar("T")


class Arm(Protocol):
    """One arm. It is built first where it is not alive. All that asks it raises ``ArmError`` where it fails."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the arm said of itself when it was last built: versions, sizes, seconds."""

    def request(self, operation: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer: plain data."""


class TwoArms(Protocol):
    """Two arms that are measured against each other, and the cache of what they have answered."""

    @property
    def reference(self) -> Arm: ...

    @property
    def other(self) -> Arm: ...

    @property
    def takes_turns(self) -> bool:
        """Whether the arms do not fit the GPU together."""

    @property
    def tight(self) -> bool:
        """Whether each arm must give its cached memory back before the other runs."""

    def beside(self, operation: str, reference: Callable[[], T], **arguments: Any) -> tuple[Any, T]:
        """The other arm's answer, and what ``reference`` asks of the reference arm: at the same time where they can.
        For what is neither timed nor weighed."""

    def renew(self) -> None:
        """Replace both processes by fresh ones."""

    def gather(self, tasks: Mapping[str, Callable[[], object]]) -> dict[str, BaseException]:
        """Run tasks that ask these arms in as few residences as can be; gives the errors of those that ended in one."""

    def conditions(self) -> Conditions | None:
        """The GPU's state now; ``None`` on a CPU."""

    def once(self, what: str, ask: Callable[[], T]) -> T:
        """Evidence of these two arms: ``ask`` runs once, later calls give its answer."""

    def shared(self, what: str, ask: Callable[[], T]) -> T:
        """The same for evidence of the reference alone, which all cases with this reference share."""


class PairArms(TwoArms, Protocol):
    """The two arms of one case."""

    @property
    def case(self) -> Case: ...

    @property
    def bf16(self) -> Arm:
        """The reference."""

    @property
    def fp8(self) -> Arm: ...

    def on_one_gpu(self) -> AbstractContextManager[Arm]:
        """The reference of a case on several GPUs, on one of them; it ends with the block."""

    def answered(self, what: str) -> bool:
        """Whether these two arms have evidence whose name begins so."""

    def folder(self, what: str) -> Path:
        """A folder for files of the reference, kept for the other cases that share it."""

    def temporary_folder(self) -> AbstractContextManager[Path]:
        """A folder for files that are deleted when the block is left."""
