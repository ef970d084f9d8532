"""Code in an arm leaves processes and threads."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.faults.misbehaviours.entries import ANSWERS, DIES, entry, simply, sleep_on


def child(work: Callable[[], Any]) -> int:
    """A fork that does this and ends; gives its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(0)


def daemon(work: Callable[[], Any]) -> int:
    """The grandchild of a fork, in a session of its own; gives its pid."""
    ends, told = os.pipe()

    def first() -> None:
        os.setsid()
        os.write(told, str(child(work)).encode())

    os.waitpid(child(first), 0)
    pid = int(os.read(ends, 20))
    os.close(ends)
    os.close(told)
    return pid


simply("a fork that returns twice", ANSWERS, "", lambda: os.fork() and None)
simply("a program that stays", ANSWERS, "", lambda: subprocess.Popen(["sleep", "600"]).pid, leaves=True)
simply(
    "a program that stays, in a session of its own",
    ANSWERS,
    "",
    lambda: subprocess.Popen(["sleep", "600"], start_new_session=True).pid,
    leaves=True,
)
simply("a fork that stays, in a session of its own", ANSWERS, "", lambda: daemon(sleep_on), leaves=True)


@entry("a child that ignores SIGTERM", ANSWERS, leaves=True)
def stubborn() -> int:
    return child(lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), sleep_on()))


@entry("dies and leaves a child that holds its socket", DIES, "exited with 5")
def holds_the_socket() -> None:
    daemon(sleep_on)
    os._exit(5)


@entry("a thread that never ends", ANSWERS)
def endless_thread() -> None:
    threading.Thread(target=sleep_on).start()


@entry("a hundred children", ANSWERS)
def many_children() -> None:
    for _ in range(100):
        child(sleep_on)
