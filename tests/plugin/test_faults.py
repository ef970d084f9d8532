"""What code in an arm may do to its process: one error with its cause or a sound answer, in time, and nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time

import pytest

from helpers.arms import call, ends, running, spec, users_of
from pytest_fp8 import ArmError
from pytest_fp8.arms import process
from pytest_fp8.arms.process import LOG_LINES, ArmProcess, tail_of
from pytest_fp8.codes import R
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow

LIMIT, GRACE = 8.0, 5.0
"""Seconds of a request that hangs, and how much longer pytest may take to end it or to close an arm."""


def sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def to_sockets(data):
    for descriptor in sockets():
        os.write(descriptor, data)


def throw(error):
    raise error


class NoText(Exception):
    def __str__(self):
        raise ValueError("no text either")


def full_disk():
    for descriptor in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    raise ValueError("mine")


def deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(600)


def one_line():
    for _ in range(200):
        os.write(1, b"x" * 10**6)
    os._exit(1)


def child(work):
    """A fork that does this and ends; gives its pid."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def own_session():
    end, told = os.pipe()

    def first():
        os.setsid()
        os.write(told, str(child(lambda: time.sleep(600))).encode())

    os.waitpid(child(first), 0)
    return int(os.read(end, 20))


def stubborn():
    return child(lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600)))


def no_folder():
    made = os.path.join(os.environ["TMPDIR"], "gone")
    os.mkdir(made)
    os.chdir(made)
    os.rmdir(made)


def closed_folder():
    made = os.path.join(os.environ["TMPDIR"], "closed", "inner")
    os.makedirs(made)
    os.chmod(made, 0)
    os.chmod(os.path.dirname(made), 0)


DIES, RAISES, HANGS, ANSWERS = R.ARM_DIED, R.ARM_RAISED, R.ARM_HUNG, None
EACH_COMMIT = {
    "address 0": (DIES, "SIGSEGV", lambda: ctypes.string_at(0)),
    "a child with its socket": (DIES, "exited with 5", lambda: (own_session(), os._exit(5))),
    "text": (DIES, "no answer", lambda: to_sockets(b"what is this\n")),
    "no descriptors": (DIES, "exited with 1", lambda: os.closerange(3, 4096)),
    "no text": (RAISES, "NoText", lambda: throw(NoText())),
    "own session": (ANSWERS, "", own_session),
    "closed folder": (ANSWERS, "", closed_folder),
}
"""One a kind: an end, a channel, an exception, what it leaves running, what it leaves on the disk."""
NIGHTLY = {
    "becomes sleep": (DIES, "closed its connection", lambda: os.execvp("sleep", ["sleep", "60"])),
    "kills its parent": (DIES, "forked from was killed", lambda: (os.kill(os.getppid(), 9), time.sleep(60))),
    "KeyboardInterrupt": (RAISES, "KeyboardInterrupt", lambda: throw(KeyboardInterrupt())),
    "escape sequences": (RAISES, "mine", lambda: throw(ValueError("\x1b[2J\x1b]0;t\x07 mine"))),
    "200 MB in a line": (DIES, "exited with 1", one_line),
    "no pickle": (R.CANNOT_SHIP, "", threading.Lock),
    "full disk": (RAISES, "ValueError: mine", full_disk),
    "GIL": (HANGS, "test_faults.py", lambda: ctypes.PyDLL(None).sleep(600)),
    "deaf": (HANGS, "", deaf),
    "half an answer": (DIES, "no answer", lambda: (to_sockets(b"\0\0\0\x63{"), time.sleep(600))),
    "stubborn child": (ANSWERS, "", stubborn),
    "no current folder": (ANSWERS, "", no_folder),
    "40 MB": (ANSWERS, "", lambda: "x" * 40_000_000),
}
ALL = [*EACH_COMMIT, *(pytest.param(what, marks=pytest.mark.nightly) for what in NIGHTLY)]


@pytest.fixture
def arm():
    made = ArmProcess(fork=True)
    made.build(spec())
    yield made
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < GRACE
    assert not made.folder.exists()
    assert ends(lambda: bool(users_of(made.folder)))


@pytest.mark.parametrize("what", ALL)
def test_a_misbehaviour_is_one_error_with_its_cause_and_leaves_nothing(arm, what):
    code, says, do = (EACH_COMMIT | NIGHTLY)[what]
    start, left, before = time.monotonic(), None, peak_megabytes()
    if code is None:
        left = ask(arm, do)
        assert ask(arm, lambda: 3) == 3
    else:
        with pytest.raises(ArmError) as error:
            ask(arm, do, LIMIT if code is HANGS else 60)
        message = error.value.message
        assert error.value.code is code
        assert says in message
        assert len(message.encode()) < 20_000
        assert not any(ord(char) < 32 and char not in "\n\t" for char in message)
        assert arm.alive == (code in (RAISES, R.CANNOT_SHIP))
        assert code is not HANGS or time.monotonic() - start < LIMIT + GRACE
    assert peak_megabytes() - before < (400 if code is ANSWERS else 64)
    arm.close()
    assert not isinstance(left, int) or ends(lambda: running(left))


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ask(arm, function, limit=60):
    return unship(arm.request("call", limit, function=ship(lambda model: function(), "a function")))


def test_temporary_files_of_an_arm_lie_in_its_own_folder(arm):
    def where():
        import tempfile

        return tempfile.mkdtemp()

    made = call(arm, where)
    assert made.startswith(f"{arm.folder}/")
    arm.close()
    assert not os.path.exists(made)


@pytest.mark.nightly
def test_a_temporary_folder_with_a_very_long_name_works(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setattr("pytest_fp8.arms.scratch._made", [])
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        assert arm.folder.is_relative_to(deep)
        assert arm.request("layers")["converted"]
    finally:
        arm.close()


@pytest.mark.parametrize(
    ("code", "output", "cause"),
    [
        (1, "", "as os._exit() does"),
        (-9, "", "out-of-memory killer"),
        (-11, "", "a library crashed"),
        (-10, "", "some code sent this signal"),
        (-6, "gloo: op.preamble.length <= op.nbytes. 64 vs 32", "ranks called other collectives"),
    ],
)
def test_the_cause_of_an_end_follows_from_its_code_and_output(code, output, cause):
    assert cause in process.cause_of(code, output)


def test_the_end_of_an_output_is_its_last_lines_or_last_stack(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}\x1b[31m\x07" for i in range(1000)))
    assert tail_of(log).splitlines()[-1] == "line 999[31m"
    assert len(tail_of(log).splitlines()) == LOG_LINES
    idle = ["Thread 0x01 (most recent call first):", "  in idle", ""]
    stack = ["Current thread 0x00007f (most recent call first):", *(f'  File "x.py", line {i}' for i in range(100))]
    log.write_text("\n".join(["before"] * 50 + idle + stack))
    assert tail_of(log).splitlines()[:2] == stack[:2]
    fatal = ["Fatal Python error: Segmentation fault", ""]
    log.write_text("\n".join(fatal + stack))
    assert tail_of(log).splitlines()[:4] == fatal + stack[:2]


FULL = """
    import errno, os, pytest, tempfile
    from torch import nn, randn
    from pytest_fp8 import Workload

    @pytest.fixture(autouse=True)
    def full(monkeypatch):
        def mkdir(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(tempfile, "mkdtemp", mkdir)

    @pytest.fixture
    def fp8_workload():
        return Workload(lambda: nn.Linear(32, 32), batch=lambda step: randn(16, 32), loss=lambda m, x: m(x).sum())

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_fp8(fp8_pair):
        fp8_pair.assert_layers()
"""


def test_a_full_temporary_folder_is_one_clear_error(pytester):
    pytester.makepyfile(FULL)
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["FP8-R08: the arm 'own-bf16-emulated on cpu' could not be started: No space left*", "*expected:*folder below*"]
    )
    result.stdout.no_fnmatch_line("*Error:*mkdir*")
