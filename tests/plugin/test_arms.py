"""Real arms in real processes, on a CPU: what they answer, what each failure becomes, what a fork may do, and what
code in an arm may do to its process and leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from helpers.arms import CASE, all_end, call, either_way, ends, fresh_process, live_arm, running, spec, users_of
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms import process
from pytest_fp8.arms.pair import PairArms
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import LOG_LINES, ArmProcess, tail_of
from pytest_fp8.arms.scratch import MARK
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm():
    with live_arm() as process:
        yield process


@pytest.fixture
def fresh(request):
    with fresh_process(request) as process:
        yield process


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(arm):
    first = arm.request("curve", seed=1, steps=5)
    assert arm.request("curve", seed=1, steps=5) == first
    assert arm.request("curve", seed=2, steps=5)["losses"] != first["losses"]
    assert arm.request("curve", seed=1, steps=5, jitter=True)["losses"] != first["losses"]


def test_logits_travel_as_raw_numbers(arm):
    logits = arm.request("logits", seed=0)
    assert isinstance(logits, bytes)
    output = np.frombuffer(logits, dtype=np.float32, offset=4)  # after the fingerprint of what entered the model
    assert output.size
    assert np.isfinite(output).all()
    assert arm.request("logits", seed=0) == logits, "the next answer is read from its own beginning"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_losses_that_are_not_finite_reach_pytest_as_they_are(fresh, value):
    fresh.start_import()
    assert fresh.receive() is None, "it has its libraries"
    fresh.build(spec(loss=lambda model, batch: model(batch).sum() * 0 + value))
    assert str(fresh.request("curve", seed=0, steps=1)["losses"]) == f"[{value}]"


def test_an_arm_has_the_variables_the_import_path_and_the_folder_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "new")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/lies_here.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    with live_arm() as arm:
        seen = call(arm, lambda: (os.environ["MINE"], os.getcwd(), __import__("lies_here").VALUE))
    assert seen == ("new", str(tmp_path), 7)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_exception_in_the_arm_is_quoted_and_the_arm_lives_on(arm):
    with pytest.raises(ArmError, match="unknown operation 'dance'") as error:
        arm.request("dance")
    assert error.value.code is R.ARM_RAISED
    assert error.value.seen == "ValueError: unknown operation 'dance'"
    assert error.value.headline.startswith("ValueError: unknown operation 'dance', in the arm '")
    assert "in answer" in error.value.cause, "without a better cause, the trace"
    assert "next:" in error.value.message
    assert arm.request("curve", seed=0, steps=1)["losses"]


@either_way
def test_an_arm_killed_in_the_middle_is_one_clear_error_and_takes_what_it_started_along(fresh):
    fresh.build(spec())
    child = call(fresh, lambda: subprocess.Popen(["sleep", "600"]).pid)
    threading.Timer(0.3, os.kill, (fresh.pid, signal.SIGKILL)).start()
    with pytest.raises(ArmError, match="died of SIGKILL") as error:
        fresh.request("curve", seed=0, steps=100_000)
    assert error.value.code is R.ARM_DIED
    assert not running(fresh.pid)
    assert all_end(child)


def hang(model):
    time.sleep(600)


@either_way
def test_an_arm_that_hangs_is_stopped_and_says_where_it_was(fresh):
    fresh.build(spec())  # however long this machine takes to import, the arm hangs where it is told to
    with pytest.raises(ArmError, match="no answer to 'call' in 3 s") as error:
        fresh.request("call", timeout=3, function=ship(hang, "a function"))
    assert error.value.code is R.ARM_HUNG
    assert "in hang" in str(error.value), "the stack of the place it hung in"
    assert not running(fresh.pid)


def test_a_request_before_the_last_ones_answer_is_refused(arm):
    arm.send("curve", seed=0, steps=1)
    with pytest.raises(RuntimeError, match="asked to 'layers' before it answered to 'curve'"):
        arm.send("layers")
    assert arm.receive()["losses"]


def test_an_arm_whose_answer_nobody_waited_for_is_gone(fresh, monkeypatch):
    fresh.build(spec())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "poll", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fresh.request("curve", seed=0, steps=1)
    assert not fresh.alive, "its answer would be taken for the next request's"


def test_an_arm_for_a_gpu_that_is_not_there_never_falls_back(fresh):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ArmError, match="it will not fall back to the CPU"):
        fresh.build(ArmSpec(Case("tiny", "bf16", "none"), "cuda"))


def test_a_full_temporary_folder_is_one_clear_error(monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ArmError, match=r"'own-bf16-emulated on cpu'.*No space left") as error:
        PairArms(CASE, ArmPool(None), spec().workload).bf16.request("layers")
    assert (error.value.code, error.value.__suppress_context__) == (R.NOT_STARTED, True)
    assert "folder below" in error.value.expected


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


# -- forks ------------------------------------------------------------------------------------------------------------


def test_workers_of_a_data_loader_start_in_a_fork_as_in_a_script(arm):
    """A child of the fork server would start them through one: too many tensors for its socket, and torch imported anew
    for each worker."""

    def loaded():
        import multiprocessing

        from torch import ones, stack
        from torch.utils.data import DataLoader

        loader = DataLoader([ones(4) for _ in range(300)], batch_size=100, num_workers=2, collate_fn=stack)
        return [float(batch.sum()) for batch in loader], multiprocessing.get_start_method()

    batches, method = call(arm, loaded)
    assert batches == [400.0] * 3
    assert method == multiprocessing.get_start_method()


def test_the_fork_server_serves_other_processes_of_this_one_as_before(arm):
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        assert pool.apply(gc.isenabled), "the collector is on"
        # What it was where the server was started, which may have been in an inner pytest, whose output goes elsewhere.
        assert pool.apply(os.readlink, ["/proc/self/fd/1"]) != os.devnull


def test_the_process_that_arms_are_forked_from_is_no_arm_s_and_serves_later_ones(fresh, monkeypatch):
    """What is an arm's ends with it. torch's compiler sets a variable in pytest's process; arms that import their
    libraries anew take seconds each."""
    fresh.build(spec())
    server = call(fresh, os.getppid)
    assert MARK.encode() not in Path(f"/proc/{server}/environ").read_bytes()
    fresh.close()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with live_arm() as later:
        assert call(later, os.getppid) == server
        assert call(later, lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"]) == "/elsewhere"


# -- what code in an arm may do: one error with its cause or a sound answer, in time, and nothing left ----------------

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


def out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


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
    "GPU memory": (R.OUT_OF_MEMORY, "smaller batch", out_of_memory),
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
    "GIL": (HANGS, "test_arms.py", lambda: ctypes.PyDLL(None).sleep(600)),
    "deaf": (HANGS, "", deaf),
    "half an answer": (DIES, "no answer", lambda: (to_sockets(b"\0\0\0\x63{"), time.sleep(600))),
    "stubborn child": (ANSWERS, "", stubborn),
    "no current folder": (ANSWERS, "", no_folder),
    "40 MB": (ANSWERS, "", lambda: "x" * 40_000_000),
}
ALL = [*EACH_COMMIT, *(pytest.param(what, marks=pytest.mark.nightly) for what in NIGHTLY)]


@pytest.fixture
def misled():
    made = ArmProcess(fork=True)
    made.build(spec())
    yield made
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < GRACE
    assert not made.folder.exists()
    assert ends(lambda: bool(users_of(made.folder)))


@pytest.mark.parametrize("what", ALL)
def test_a_misbehaviour_is_one_error_with_its_cause_and_leaves_nothing(misled, what):
    code, says, do = (EACH_COMMIT | NIGHTLY)[what]
    start, left, before = time.monotonic(), None, peak_megabytes()
    if code is None:
        left = ask(misled, do)
        assert ask(misled, lambda: 3) == 3
    else:
        with pytest.raises(ArmError) as error:
            ask(misled, do, LIMIT if code is HANGS else 60)
        message = error.value.message
        assert error.value.code is code
        assert says in message
        assert len(message.encode()) < 20_000
        assert not any(ord(char) < 32 and char not in "\n\t" for char in message)
        assert misled.alive == (code not in (DIES, HANGS))
        assert code is not HANGS or time.monotonic() - start < LIMIT + GRACE
    assert peak_megabytes() - before < (400 if code is ANSWERS else 64)
    misled.close()
    assert not isinstance(left, int) or ends(lambda: running(left))


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ask(arm, function, limit=60):
    return unship(arm.request("call", limit, function=ship(lambda model: function(), "a function")))


def test_temporary_files_of_an_arm_lie_in_its_own_folder(misled):
    made = call(misled, tempfile.mkdtemp)
    assert made.startswith(f"{misled.folder}/")
    misled.close()
    assert not os.path.exists(made)


@pytest.mark.nightly
def test_a_temporary_folder_with_a_very_long_name_works(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setattr("pytest_fp8.arms.scratch._made", [])
    with live_arm() as arm:
        assert arm.folder.is_relative_to(deep)
        assert arm.request("layers")["converted"]
