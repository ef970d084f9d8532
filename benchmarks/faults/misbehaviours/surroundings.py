"""Code in an arm changes what is around it: folders, variables, signal handlers, its socket."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket

from benchmarks.faults.misbehaviours.entries import ANSWERS, DIES, entry, simply, sockets


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
