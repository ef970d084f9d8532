"""Code of the user that breaks the arm it runs in: one error that says what happened, and nothing stays behind."""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import time
from pathlib import Path

import pytest

from helpers.arms import all_end, spec
from pytest_fp8 import ArmError
from pytest_fp8.arms import process
from pytest_fp8.arms.process import LOG_LINES, MOST_BYTES, ArmProcess, tail_of
from pytest_fp8.codes import R
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow


INTERPRETER = pytest.param(False, id="interpreter", marks=pytest.mark.nightly)
STARTED = pytest.mark.parametrize("arm", [INTERPRETER, pytest.param(True, id="fork")], indirect=True)
"""Where it matters how the process was started. An interpreter of its own takes seconds."""


@pytest.fixture
def arm(request):
    process = ArmProcess(fork=getattr(request, "param", True))
    process.build(spec())
    yield process
    process.close()
    assert all_end(process.pid)


def call(arm, function, timeout=30.0):
    """What ``function()`` gives inside the arm."""
    return unship(arm.request("call", timeout, function=ship(lambda model: function(), "a function")))


def ends_in(arm, function, code, timeout=30.0):
    start = time.monotonic()
    with pytest.raises(ArmError) as error:
        call(arm, function, timeout)
    assert error.value.code is code, error.value
    assert time.monotonic() - start < timeout + 5
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return error.value


def sockets():
    return [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}") and is_socket(fd)]


def is_socket(fd):
    return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")


@STARTED
def test_a_segfault_shows_the_stack_of_the_thread_that_crashed(arm):
    def crash():
        import faulthandler

        faulthandler._sigsegv()

    error = ends_in(arm, crash, R.ARM_DIED)
    assert "SIGSEGV" in error.headline
    assert "Segmentation fault" in error.seen
    assert "in crash" in error.seen


def test_garbage_on_the_socket_is_one_error(arm):
    def write():
        for fd in sockets():
            os.write(fd, b"what is this\n")

    ends_in(arm, write, R.UNREADABLE_ANSWER)
    assert not arm.alive


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        (struct.pack("!i", 12) + b"[1, 2, 3, 4]", "12 bytes that begins with b'[1, 2, 3, 4]'"),
        (struct.pack("!i", 0), "0 bytes"),
        (struct.pack("!i", -1) + struct.pack("!Q", MOST_BYTES + 1), "bad message length"),
        (struct.pack("!i", 10) + b'{"id": 1, ', "10 bytes that begins with"),
        (struct.pack("!i", 22) + b'{"id": 7, "result": 1}', 'begins with b\'{"id": 7'),
        (struct.pack("!i", 2**16) + b'{"id": ' + b"[" * (2**16 - 7), "65536 bytes"),
    ],
)
def test_a_message_that_is_no_answer_is_told(arm, written, seen):
    def write():
        for fd in sockets():
            os.write(fd, written)
        time.sleep(20)

    assert seen in ends_in(arm, write, R.UNREADABLE_ANSWER).seen


def test_an_answer_that_never_ends_is_no_wait_without_end(monkeypatch):
    monkeypatch.setattr(process, "SILENCE_SECONDS", 1)
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())

        def begin():
            for fd in sockets():
                os.write(fd, struct.pack("!i", 100) + b'{"id": 2, "result": [')
            time.sleep(20)

        ends_in(arm, begin, R.ARM_HUNG)
    finally:
        arm.close()


def test_a_fork_that_returns_twice_gives_one_answer(arm):
    def twice():
        os.fork()
        return os.getpid()

    assert call(arm, twice) == arm.pid
    assert call(arm, lambda: "next") == "next"


@STARTED
def test_a_death_is_seen_at_once_although_a_child_holds_the_socket(arm):
    def leave_a_child():
        if not os.fork():
            os.setsid()
            time.sleep(20)
            os._exit(0)
        os._exit(5)

    start = time.monotonic()
    assert "exited with 5" in ends_in(arm, leave_a_child, R.ARM_DIED).headline
    assert time.monotonic() - start < 5


def test_an_arm_that_prints_much_costs_little_memory_and_time(arm):
    def shout():
        for _ in range(300):
            os.write(1, b"x" * 999_999 + b"\n")
        os._exit(1)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = ends_in(arm, shout, R.ARM_DIED)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
    assert len(error.message) < 20_000


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", "as os._exit() does"),
        ("Traceback (most recent call last):\n", "an exception outside"),
        ('  File "library.py", line 9, in load\n    import missing\n' * 40, "an exception outside"),
        ('Current thread 0x1 (most recent call first):\n  File "train.py", line 9 in loss\n', "as os._exit() does"),
    ],
)
def test_an_arm_that_exits_as_python_does_had_an_exception_only_where_it_shows_one(arm, output, cause):
    def leave():
        os.write(2, output.encode())
        os._exit(1)

    assert cause in ends_in(arm, leave, R.ARM_DIED).cause


def test_what_an_arm_prints_moves_no_terminal(arm):
    def colour():
        os.write(2, b"\x1b[2J\x1b]0;title\x07 mine\n")
        os._exit(1)

    error = ends_in(arm, colour, R.ARM_DIED)
    assert "mine" in error.seen
    assert "\x1b" not in error.message


@STARTED
def test_a_program_that_the_arm_started_ends_with_it(arm):
    pid = call(arm, lambda: subprocess.Popen(["sleep", "600"]).pid)
    assert not any(os.readlink(link).startswith("socket:") for link in Path(f"/proc/{pid}/fd").iterdir())
    arm.close()
    assert all_end(pid)


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
