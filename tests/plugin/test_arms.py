"""Real arms in real processes, on a CPU: what they answer, what each failure becomes, and what a fork may do."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from helpers.arms import all_end, call, either_way, fresh_process, live_arm, running, spec
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.scratch import MARK
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


def not_a_number(model, batch):
    return model(batch).sum() * float("nan")


def infinite(model, batch):
    return model(batch).sum() * 0 + float("inf")


@pytest.mark.parametrize(("loss", "is_so"), [(not_a_number, math.isnan), (infinite, math.isinf)])
def test_losses_that_are_not_finite_reach_pytest_as_they_are(fresh, loss, is_so):
    fresh.start_import()
    assert fresh.receive() is None, "it has its libraries"
    fresh.build(spec(loss=loss))
    assert is_so(fresh.request("curve", seed=0, steps=1)["losses"][0])


def test_an_arm_has_the_variables_the_import_path_and_the_folder_of_now(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "new")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/lies_here.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        seen = call(arm, lambda: (os.environ["MINE"], os.getcwd(), __import__("lies_here").VALUE))
    finally:
        arm.close()
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


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_may_have_children_as_an_interpreter_may(fresh):
    fresh.build(spec())

    def child_s_exit_code():
        import multiprocessing

        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return child.exitcode

    assert call(fresh, child_s_exit_code) == 0


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


def test_the_process_that_arms_are_forked_from_is_no_arm_s(fresh):
    """What is an arm's ends with it."""
    fresh.build(spec())
    server = call(fresh, os.getppid)
    assert MARK.encode() not in Path(f"/proc/{server}/environ").read_bytes()
    fresh.close()
    after = ArmProcess(fork=True)
    try:
        after.build(spec())
        assert call(after, os.getppid) == server
    finally:
        after.close()


def test_a_test_that_compiles_in_pytest_s_process_slows_no_later_arm(arm, monkeypatch):
    """torch's compiler sets the variable where it runs; arms that import their libraries anew take seconds each."""
    server = call(arm, os.getppid)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    with live_arm() as later:
        assert call(later, os.getppid) == server
        assert call(later, lambda: os.environ["TORCHINDUCTOR_CACHE_DIR"]) == "/elsewhere"
