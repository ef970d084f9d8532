"""Code in an arm does not return."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import threading

from benchmarks.faults.misbehaviours.entries import HANGS, entry, simply, sleep_on, to_sockets


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def spin() -> None:
    while True:
        pass


simply("a deadlock", HANGS, "in deadlock", deadlock)
simply("an endless loop", HANGS, "in spin", spin)
simply("waits for ten minutes", HANGS, "in sleep_on", sleep_on)
simply("waits in C with the GIL held", HANGS, "hangs.py", lambda: ctypes.PyDLL(None).sleep(600))
simply("stops itself (SIGSTOP)", HANGS, "", lambda: os.kill(os.getpid(), signal.SIGSTOP))
simply("half an answer, and no more", HANGS, "", lambda: (to_sockets(struct.pack("!i", 99) + b'{"id": '), sleep_on()))


@entry("ignores every signal and waits", HANGS)
def deaf() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    sleep_on()


@entry("takes SIGUSR1 back and waits", HANGS)
def no_stacks() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    sleep_on()
