"""What code in an arm may do to its process. Each function runs inside an arm, as a user's own would."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

ANSWERS = "answers"
"""The arm answers as a sound one does."""
DIES, RAISES, HANGS, GARBLES = "died", "raised", "hung", "unreadable"
"""Kinds of :class:`pytest_fp8.errors.ArmError`."""


@dataclass(frozen=True)
class Misbehaviour:
    """One of the catalogue."""

    what: str
    do: Callable[[], Any]
    ends: str
    """How the request ends in which it happens: a kind of error, or :data:`ANSWERS`."""
    says: str = ""
    """What the error's message must hold: the cause."""
    later: str = ""
    """How the next request ends, where that is another error."""
    forks_only: bool = False
    """Whether it is about arms that are forks: the parent of another one is pytest itself."""
    leaves: bool = False
    """Whether the function gives the pid of a process, which must end with the arm."""


CATALOGUE: list[Misbehaviour] = []


def entry(what: str, ends: str, says: str = "", **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(do: Callable[[], Any]) -> Callable[[], Any]:
        CATALOGUE.append(Misbehaviour(what, do, ends, says, **more))
        return do

    return add


def simply(what: str, ends: str, says: str, do: Callable[[], Any], **more: Any) -> None:
    entry(what, ends, says, **more)(do)


def sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass
    return found


def to_sockets(data: bytes) -> None:
    for descriptor in sockets():
        os.write(descriptor, data)


def sleep_on() -> None:
    time.sleep(600)


# -- the process of an arm ends, in the request or after it -----------------------------------------------------------


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


# -- it raises what is hard to tell of, or where there is no memory, no file, no output -------------------------------


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


# -- it does not return -----------------------------------------------------------------------------------------------


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
simply("waits in C with the GIL held", HANGS, "misbehaviours.py", lambda: ctypes.PyDLL(None).sleep(600))
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


# -- it writes to the arm's socket, and prints ------------------------------------------------------------------------


def message(text: bytes) -> bytes:
    """As :meth:`multiprocessing.connection.Connection.send_bytes` writes it."""
    return struct.pack("!i", len(text)) + text


simply("text on its socket", GARBLES, "bad message length", lambda: to_sockets(b"what is this\n"))
simply("an old answer", GARBLES, 'begins with b\'{"id": -1', lambda: to_sockets(message(b'{"id": -1, "result": 1}')))
simply("an answer that is no JSON", GARBLES, "begins with", lambda: to_sockets(message(b'{"id": NaN, "result" 1}')))
simply("an answer of 2**40 bytes", GARBLES, "bad message length", lambda: to_sockets(struct.pack("!iQ", -1, 2**40)))
simply("a JSON of a million brackets", GARBLES, "begins with", lambda: to_sockets(message(b'{"id": ' + b"[" * 10**6)))
simply("an answer without a result", GARBLES, "'result'", lambda: to_sockets(message(b'{"id": 2}')))


@entry("half an answer, then its death", DIES, "exited with 3")
def half_and_gone() -> None:
    to_sockets(struct.pack("!i", 99) + b'{"id": ')
    os._exit(3)


@entry("prints into its socket", GARBLES)
def print_to_socket() -> None:
    os.dup2(sockets()[0], 1)
    print("hello", flush=True)


@entry("prints 200 MB in lines, then dies", DIES, "exited with 1")
def many_lines() -> None:
    for _ in range(200):
        os.write(1, (b"x" * 99 + b"\n") * 10_000)
    os._exit(1)


@entry("prints 200 MB in one line", ANSWERS)
def one_line() -> None:
    for _ in range(200):
        os.write(1, b"x" * 10**6)


@entry("prints random bytes, then dies", DIES, "exited with 1")
def noise() -> None:
    os.write(2, os.urandom(10**6))
    os._exit(1)


@entry("prints escape sequences, then dies", DIES, "mine")
def colours() -> None:
    os.write(2, b"\x1b[2J\x1b]0;title\x07 mine\n")
    os._exit(1)


@entry("closes its standard output and error", ANSWERS)
def closed_output() -> None:
    os.close(1)
    os.close(2)


@entry("a thread that prints without end", ANSWERS)
def prints_on() -> None:
    def work() -> None:
        while True:
            os.write(1, b"x" * 999 + b"\n")
            time.sleep(0.001)

    threading.Thread(target=work, daemon=True).start()


# -- it leaves processes and threads ----------------------------------------------------------------------------------


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


# -- it changes what is around it: folders, variables, signal handlers, its socket ------------------------------------


@entry("deletes its current folder", ANSWERS)
def no_folder() -> None:
    made = os.path.join(os.environ["TMPDIR"], "gone")
    os.mkdir(made)
    os.chdir(made)
    os.rmdir(made)


@entry("deletes its temporary folder, then dies", DIES, "exited with 1")
def no_temporary_folder() -> None:
    shutil.rmtree(os.environ["TMPDIR"])
    os._exit(1)


@entry("fills its temporary folder with folders of mode 000", ANSWERS)
def closed_folder() -> None:
    made = os.path.join(os.environ["TMPDIR"], "closed", "inner")
    os.makedirs(made)
    os.chmod(made, 0)
    os.chmod(os.path.dirname(made), 0)


simply("changes its current folder", ANSWERS, "", lambda: os.chdir("/"))
simply("empties its variables", ANSWERS, "", os.environ.clear)
simply("handles SIGCHLD and SIGPIPE anew", ANSWERS, "", lambda: (signal.signal(17, signal.SIG_IGN), None)[1])
simply("a result of 40 MB", ANSWERS, "", lambda: "x" * 40_000_000)
simply("a result of NaN, infinity and a huge number", ANSWERS, "", lambda: [float("nan"), float("inf"), 10**4000])


@entry("makes its socket non-blocking", ANSWERS)
def non_blocking() -> None:
    for descriptor in sockets():
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NONBLOCK)


@entry("shuts its socket down", DIES)
def shut_down() -> None:
    for descriptor in sockets():
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)


# The last one: arms start more slowly afterwards, as the fork server's socket is gone.
@entry("deletes the whole session's temporary folder", ANSWERS)
def no_session_folder() -> None:
    shutil.rmtree(os.path.dirname(os.environ["TMPDIR"]))
