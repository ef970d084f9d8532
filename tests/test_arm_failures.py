"""Real arms in real processes, on a CPU: what each failure becomes, and when an answer is there."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Connection

import pytest

from helpers.arms import all_end, call, either_way, fresh_process, live_arm, running, spec
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.codes import R
from pytest_fp8.shipping import ship

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm():
    with live_arm() as process:
        yield process


@pytest.fixture
def fresh(request):
    with fresh_process(request) as process:
        yield process


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


def out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_running_out_of_memory_is_named(fresh):
    with pytest.raises(ArmError, match="ran out of GPU memory") as error:
        fresh.build(spec(build=out_of_memory))
    assert error.value.code is R.OUT_OF_MEMORY
    assert "smaller batch" in str(error.value)


def test_an_arm_for_a_gpu_that_is_not_there_never_falls_back(fresh):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ArmError, match="it will not fall back to the CPU"):
        fresh.build(ArmSpec(Case("tiny", "bf16", "none"), "cuda"))
