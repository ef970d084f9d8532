"""SIGTERM and SIGHUP end a session as Ctrl-C does: arms are closed, the table is shown, the report is written.

They are what ``timeout``, Slurm, Kubernetes and a cancelled CI job send, some seconds before SIGKILL.
"""

from __future__ import annotations

import contextlib
import signal
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def when_parent_ends(number: signal.Signals) -> None:
    """Ask the kernel to send this process the signal when its parent ends. Only Linux can."""
    import ctypes

    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)


class Ended(KeyboardInterrupt):
    """The session was told to end; its text is the signal's name."""


class Endings:
    """What this process does on such a signal."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        """What the signals did that are taken."""

    def take(self) -> None:
        """From now on these signals end the session. One that this process ignores, as under ``nohup``, or handles
        otherwise stays as it is."""
        # Only the main thread can.
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._end)

    def _end(self, number: int, _: object) -> NoReturn:
        self.ignore()
        raise Ended(signal.Signals(number).name)

    def ignore(self) -> None:
        """The session ends already: a further signal, or Ctrl-C, must not keep it from writing what it knows."""
        if self._before and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before[signal.SIGINT] = signal.default_int_handler
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def give_back(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
