"""Code in an arm raises what is hard to tell of, or where there is no memory, no file, no output."""

from __future__ import annotations

import os
import resource
import sys
import threading
from typing import Any

from benchmarks.faults.misbehaviours.entries import RAISES, entry, simply


def throw(error: BaseException) -> None:
    raise error


def deeper(n: int) -> int:
    return deeper(n + 1) + 1


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


class NoPickle:
    def __reduce__(self) -> Any:
        raise TypeError("this object stays here")


simply("sys.exit(7)", RAISES, "SystemExit: 7", lambda: sys.exit(7))
simply("KeyboardInterrupt", RAISES, "KeyboardInterrupt", lambda: throw(KeyboardInterrupt()))
simply("GeneratorExit", RAISES, "GeneratorExit", lambda: throw(GeneratorExit("at the end")))
simply("endless recursion", RAISES, "RecursionError", lambda: deeper(0))
simply("an exception whose text raises", RAISES, "NoText", lambda: throw(NoText()))
simply("an exception of 100 MB", RAISES, "ValueError: xxx", lambda: throw(ValueError("x" * 10**8)))
simply("an exception with escape sequences", RAISES, "mine", lambda: throw(ValueError("\x1b[2J\x1b]0;t\x07 mine")))
simply("an exception with lone surrogates", RAISES, "mine", lambda: throw(ValueError("\udc80 mine \ud800")))
simply("a result that cannot be pickled", RAISES, "", threading.Lock)
simply("a result that refuses to be pickled", RAISES, "this object stays here", NoPickle)
simply("more memory than there is", RAISES, "MemoryError", lambda: bytearray(2**46))


@entry("memory limit (RLIMIT_AS), then an allocation", RAISES, "MemoryError")
def little_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    bytearray(2**30)


@entry("no more files (RLIMIT_NOFILE)", RAISES, "Too many open files")
def no_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    open(os.devnull).close()


@entry("raises where its output goes to a full disk", RAISES, "ValueError: mine")
def full_disk() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    raise ValueError("mine")


@entry("raises where no file may grow (RLIMIT_FSIZE)", RAISES, "ValueError: mine")
def no_growth() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    raise ValueError("mine")


@entry("raises after it closed sys.stdout and sys.stderr", RAISES, "ValueError: mine")
def closed_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("mine")


@entry("raises in a fork, which comes back as well", RAISES, "ValueError: mine")
def raises_twice() -> None:
    os.fork()
    raise ValueError("mine")
