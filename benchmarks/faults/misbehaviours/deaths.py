"""The process of an arm ends, in the request or after it."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import threading
import time
from functools import partial
from typing import Any

from benchmarks.faults.misbehaviours.entries import ANSWERS, DIES, entry, simply


def own_signal(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(5)


simply("os._exit(0)", DIES, "exited with 0", lambda: os._exit(0))
simply("os._exit(7)", DIES, "exited with 7", lambda: os._exit(7))
simply("os.abort()", DIES, "SIGABRT", os.abort)
simply("reads address 0", DIES, "SIGSEGV", lambda: ctypes.string_at(0))
simply("SIGKILL, as the out-of-memory killer sends", DIES, "out-of-memory killer", lambda: own_signal(9))
for _each in (signal.SIGTERM, signal.SIGBUS, signal.SIGFPE, signal.SIGHUP, signal.SIGXCPU):
    simply(f"dies of {_each.name}", DIES, _each.name, partial(own_signal, _each))
simply("becomes the program true", DIES, "exited with 0", lambda: os.execvp("true", ["true"]))
simply("becomes the program sleep", DIES, "closed its connection", lambda: os.execvp("sleep", ["sleep", "60"]))
simply("closes every file descriptor", DIES, "exited with 1", lambda: os.closerange(3, 4096))
simply(
    "kills the process that it was forked from",
    DIES,
    "forked from was killed",
    lambda: (os.kill(os.getppid(), 9), time.sleep(60)),
    forks_only=True,
)


@entry("segfault with faulthandler switched off", DIES, "SIGSEGV")
def quiet_crash() -> None:
    faulthandler.disable()
    ctypes.string_at(0)


@entry("dies half a second after its answer", ANSWERS, later="SIGKILL")
def dies_later() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


@entry("an alarm of its own that nobody handles", ANSWERS, later="SIGALRM")
def alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.5)


@entry("replaces json.dumps", DIES, "no more dumps")
def no_json() -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise TypeError("no more dumps")

    json.dumps = broken
