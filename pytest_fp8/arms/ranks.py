"""An arm of several ranks seen from pytest: a process for each, asked the same in step, answering as one.

The ranks are started as ``torchrun`` starts them (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
``MASTER_PORT``) and kept as long as the arm. Rank i takes the i-th GPU that this process sees. What goes wrong on one
rank is the arm's: all ranks end, and the error names the one that began.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_fp8.arms.asked import REQUEST_SECONDS, Asked
from pytest_fp8.arms.channel import LOOK_SECONDS
from pytest_fp8.arms.disagreement import RanksDisagree
from pytest_fp8.arms.hung import DETAIL, hung
from pytest_fp8.arms.merging import merged
from pytest_fp8.arms.process import COMPILES_NOTHING, ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.errors import ArmError

if TYPE_CHECKING:
    from pytest_fp8.arms.environment import ArmEnvironment

GRACE_SECONDS = 5.0
"""How long the other ranks may still answer after one has failed. They may wait for it in a collective for minutes."""
ADDRESS = "127.0.0.1"
CONSEQUENCE = re.compile(r"closed by peer|reset by peer|Broken pipe|gloo|NCCL|DistBackendError|DistNetworkError", re.I)
"""What a rank says whose partner has failed."""
OTHER_COLLECTIVES = re.compile(r"collective mismatch|Received data size doesn't match|op\.preamble\.length", re.I)
"""What gloo says of ranks whose calls do not fit together."""
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)


class RankedProcess(Asked):
    """The processes of an arm's ranks, with the methods of :class:`~pytest_fp8.arms.process.ArmProcess`."""

    def __init__(
        self,
        ranks: int,
        backend: str = "bf16",
        environment: ArmEnvironment | None = None,
        fork: bool = False,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._reserved = reserved_port()
        self.port: int = self._reserved.getsockname()[1]
        self.ranks: list[ArmProcess] = []
        try:
            for rank in range(ranks):
                self.ranks.append(ArmProcess(backend, environment, fork, self._variables(rank, ranks, device)))
        except BaseException:
            self.close()
            raise

    def _variables(self, rank: int, ranks: int, device: str) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(self.port),
            # Of a torchrun around pytest: the ranks would wait for a store of its agent's on this port.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            # DeepSpeed takes a GPU where there is one, though the ranks are emulated.
            **({"DS_ACCELERATOR": "cpu", **COMPILES_NOTHING} if device == "cpu" else {}),
            # As under torchrun: what rank 0 prepares in the temporary folder, the others find.
            **({"TMPDIR": self.ranks[0].temporary} if rank and self.ranks[0].temporary else {}),
        }

    @property
    def pid(self) -> int:
        """Of rank 0."""
        return self.ranks[0].pid

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self.ranks}

    @property
    def alive(self) -> bool:
        return all(process.alive for process in self.ranks)

    @property
    def has_imported(self) -> bool:
        return all(process.has_imported for process in self.ranks)

    def start_build(self, spec: ArmSpec) -> None:
        self._note_asked("build")
        for rank, process in enumerate(self.ranks):
            process.start_build(spec)
            self.name = process.name
            process.name = f"{self.name}, rank {rank} of {len(self.ranks)}"

    def send(self, operation: str, **arguments: Any) -> None:
        self._note_asked(operation)
        for process in self.ranks:
            process.send(operation, **arguments)

    def receive(self, timeout: float = REQUEST_SECONDS) -> Any:
        """Wait for all ranks' answers to the last request; what they say together. Raises :class:`ArmError`."""
        answers: dict[int, Any] = {}
        errors: dict[int, ArmError] = {}
        try:
            silent = self._collect(timeout, answers, errors)
            if silent and not errors:
                self._raise_hung(silent, timeout)
        except BaseException:
            self.close()
            raise
        self._reserved.close()
        self._answer_due = False
        if errors:
            if silent or not self.alive or self._asked != "build":
                # A step that was stopped in the middle leaves weights gathered, and the next one would start from them.
                self.close()
            raise self._explained(_began(errors))
        try:
            return merged(self._asked, [answers[rank] for rank in range(len(self.ranks))])
        except RanksDisagree as difference:
            raise self._disagreement(difference) from None

    def _collect(self, timeout: float, answers: dict[int, Any], errors: dict[int, ArmError]) -> list[int]:
        """Fill in what each rank answers, or the error that it ended with; gives the ranks that said nothing in time,
        which is short once one has failed."""
        deadline = time.monotonic() + timeout
        silent = dict(enumerate(self.ranks))
        while silent:
            left = deadline - time.monotonic()
            ready = wait([process.fileno() for process in silent.values()], max(0.0, min(left, LOOK_SECONDS)))
            told = [rank for rank, each in silent.items() if each.fileno() in ready or not each.alive]
            if not told and left <= 0:
                break
            for rank in told:
                try:
                    answers[rank] = silent.pop(rank).receive(timeout)
                except ArmError as error:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return sorted(silent)

    def close(self) -> None:
        """End all ranks and what they started. Safe to call twice."""
        self._reserved.close()
        for process in self.ranks:
            process.close()

    def death(self) -> ArmError:
        """As :meth:`ArmProcess.death`, of the rank that began."""
        return _began({rank: process.death() for rank, process in enumerate(self.ranks) if not process.alive})

    # -- what went wrong ------------------------------------------------------------------------------------------

    def _raise_hung(self, silent: list[int], timeout: float) -> NoReturn:
        """Raise with the stacks of the ranks without an answer."""
        for rank in silent:
            # faulthandler in the worker writes every thread's stack to the log.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        tails = {rank: self.ranks[rank].tail() for rank in silent}
        raise hung(self.name, self._asked, timeout, len(self.ranks), tails)

    def _explained(self, error: ArmError) -> ArmError:
        if OTHER_COLLECTIVES.search(error.seen):
            return self._other_collectives(error)
        if not PORT_TAKEN.search(error.seen):
            return error
        return ArmError(
            R.PORT_TAKEN,
            f"the ranks of the arm {self.name!r} could not meet: port {self.port} is in use",
            expected=f"{ADDRESS}:{self.port}, which was free when the arm was started",
            seen=error.seen,
            cause="another program on this machine took the port in the seconds between",
            next_step="run the test again: each arm looks for a free port anew",
        )

    def _other_collectives(self, error: ArmError) -> ArmError:
        """Whichever rank notices is killed by gloo: it is not known to be the one that began."""
        return ArmError(
            R.OTHER_COLLECTIVES,
            f"the ranks of the arm {self.name!r} called other collectives than each other, or with other sizes, while "
            f"they were asked to {self._asked!r}",
            expected="the same collectives of the same sizes in the same order on every rank",
            seen=error.seen,
            cause="a rank that goes another way: it skips, freezes or leaves unconverted what the others do not; or "
            "float8_all_gather, where the ranks cannot share the rows of a weight evenly",
            next_step=f"run the same case alone with -k, and with {DETAIL}",
        )

    def _disagreement(self, difference: RanksDisagree) -> ArmError:
        return ArmError(
            R.RANKS_DISAGREE,
            f"rank {difference.rank} of the arm {self.name!r} differs from rank 0: {difference.what}",
            expected=f"the same on all {len(self.ranks)} ranks",
            seen=f"rank 0: {difference.first}\nrank {difference.rank}: {difference.other}",
            cause=difference.cause,
            next_step=difference.next_step,
        )


AnyProcess = ArmProcess | RankedProcess


def reserved_port() -> socket.socket:
    """A socket bound to a free port, and not listening: rank 0 can listen on it, and nothing else is given it.

    On every address, as torch's store listens: of a port that is held on one address alone the kernel gives the others
    away. Two arms that met at a time on four H100s lost one so, to NCCL most likely, which listens on a network's.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def _began(errors: dict[int, ArmError]) -> ArmError:
    """The error that the others follow from: a death or a lack of memory first, a broken connection last."""
    first = (R.ARM_DIED, R.OUT_OF_MEMORY)

    def order(rank: int) -> tuple[bool, bool, int]:
        return errors[rank].code not in first, bool(CONSEQUENCE.search(errors[rank].seen)), rank

    return errors[min(errors, key=order)]
