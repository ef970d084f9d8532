"""SIGTERM and SIGHUP end a session as Ctrl-C does: arms are closed, the table is shown, the report is written.

They are what ``timeout``, Slurm, Kubernetes and a cancelled CI job send, some seconds before SIGKILL.
"""

from __future__ import annotations

import contextlib
import signal
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """The session was told to end; its text is the signal's name."""


class Endings:
    """What this process does on such a signal."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []

    def take(self) -> None:
        """From now on these signals end the session. One that this process ignores, as under ``nohup``, or handles
        otherwise stays as it is."""
        # Only the main thread can.
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._end)
                    self._taken.append(number)

    def _end(self, number: int, _: object) -> NoReturn:
        self.ignore()
        raise Ended(signal.Signals(number).name)

    def ignore(self) -> None:
        """The session ends already: a further signal must not keep it from writing what it knows."""
        for number in self._taken:
            signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        for number in self._taken:
            signal.signal(number, signal.SIG_DFL)
        self._taken.clear()
