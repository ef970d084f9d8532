"""Real arms in real processes, on a CPU: what each failure becomes, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pytest_fp8 import ArmError, Case, SettingsError, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.shipping import ship, unship

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, loss_steps=45, loss_seeds=2)


def make_model():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))


def make_batch(step):
    import torch

    return torch.randn(16, 32)


def square(model, batch):
    return (model(batch) - batch).float().pow(2).mean()


def spec(case=CASE, **changes):
    workload = Workload(**{"build": make_model, "batch": make_batch, "loss": square, **changes})
    return ArmSpec(case, "cpu", workload.ship("a test"), threads=1)


@pytest.fixture(scope="module")
def arm():
    process = ArmProcess()
    process.build(spec())
    yield process
    process.close()


@pytest.fixture
def fresh():
    process = ArmProcess()
    yield process
    process.close()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_same_seed_gives_the_same_curve_and_another_seed_another(arm):
    first = arm.request("curve", seed=1, steps=5)
    assert arm.request("curve", seed=1, steps=5) == first
    assert arm.request("curve", seed=2, steps=5)["losses"] != first["losses"]
    assert arm.request("curve", seed=1, steps=5, jitter=True)["losses"] != first["losses"]


def test_both_layers_are_converted_and_all_three_roles_execute(arm):
    layers = arm.request("layers")
    assert layers["converted"] == ["0", "2"]
    assert {(p["phase"], p["kind"]) for p in layers["products"]} == {("forward", "fp8"), ("backward", "fp8")}
    # torchao computes the input's gradient even where nobody asked for it, as for the first layer here.
    assert len(layers["products"]) == 6


def test_an_exception_in_the_arm_is_quoted_and_the_arm_lives_on(arm):
    with pytest.raises(ArmError, match="unknown operation 'dance'") as error:
        arm.request("dance")
    assert error.value.kind == "raised"
    assert arm.request("curve", seed=0, steps=1)["losses"]


def test_an_arm_killed_in_the_middle_is_one_clear_error(fresh):
    fresh.build(spec())
    threading.Timer(0.3, os.kill, (fresh.pid, signal.SIGKILL)).start()
    with pytest.raises(ArmError, match="died of SIGKILL") as error:
        fresh.request("curve", seed=0, steps=100_000)
    assert error.value.kind == "died"
    assert gone(fresh.pid)


def test_a_question_before_the_last_ones_answer_is_refused(arm):
    arm.send("curve", seed=0, steps=1)
    with pytest.raises(RuntimeError, match="asked to 'layers' before it answered to 'curve'"):
        arm.send("layers")
    assert arm.receive()["losses"]


def test_an_arm_whose_answer_nobody_waited_for_is_gone(fresh, monkeypatch):
    fresh.build(spec())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pytest_fp8.arms.process.select.select", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fresh.request("curve", seed=0, steps=1)
    assert not fresh.alive, "its answer would be taken for the next question's"
    assert gone(fresh.pid)


def hang(model):
    time.sleep(600)


def test_an_arm_that_hangs_is_stopped_and_says_where_it_was(fresh):
    fresh.build(spec())  # however long this machine takes to import, the arm hangs where it is told to
    with pytest.raises(ArmError, match="no answer to 'call' in 3 s") as error:
        fresh.request("call", timeout=3, function=ship(hang, "a function"))
    assert error.value.kind == "hung"
    assert "in hang" in str(error.value), "the stack of the place it hung in"
    assert gone(fresh.pid)


def out_of_memory():
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_running_out_of_memory_is_named(fresh):
    with pytest.raises(ArmError, match="ran out of GPU memory") as error:
        fresh.build(spec(build=out_of_memory))
    assert error.value.kind == "out of memory"
    assert "smaller batch" in str(error.value)


def test_an_arm_that_exits_shows_the_end_of_its_output(fresh):
    def build():
        print("the last words", flush=True)
        os._exit(3)

    with pytest.raises(ArmError, match="exited with 3") as error:
        fresh.build(spec(build=build))
    assert "the last words" in str(error.value)


def test_an_arm_for_a_gpu_that_is_not_there_never_falls_back(fresh):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ArmError, match="it will not fall back to the CPU"):
        fresh.build(ArmSpec(Case("tiny", "bf16", "none"), "cuda"))


def odd_tokens(step):
    import torch

    return torch.randn(13, 32)


def test_a_token_count_that_breaks_fp8_is_explained(fresh):
    with pytest.raises(ArmError, match="was given 13 rows") as error:
        fresh.build(spec(batch=odd_tokens))
    assert "multiples of 16" in str(error.value)
    assert "pad the batch" in str(error.value)


def odd_model():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 10), torch.nn.Linear(10, 32), torch.nn.Linear(32, 32))


def test_sizes_that_are_no_multiple_of_16_are_left_with_the_reason(fresh):
    fresh.build(spec(build=odd_model))
    layers = fresh.request("layers")
    assert layers["converted"] == ["2"]
    assert layers["skipped"]["0"] == "size: out_features=10 is not a multiple of 16"
    assert layers["skipped"]["1"] == "size: in_features=10 is not a multiple of 16"


def test_closing_ends_the_whole_group_and_its_log():
    process = ArmProcess()
    log = process.log
    assert not gone(process.pid)
    process.close()
    process.close()
    assert gone(process.pid)
    assert not log.exists()


def test_no_arm_outlives_a_parent_that_was_killed(tmp_path):
    import subprocess
    import sys

    code = (
        "import os, signal\nfrom pytest_fp8.arms.process import ArmProcess\n"
        "print(ArmProcess().pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 15
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert gone(pid)


def test_no_garbage_is_looked_for_in_what_was_imported_and_all_is_looked_at_afterwards():
    program = (
        "import gc; from pytest_fp8.worker.main import _import_ahead; before = gc.get_stats()[2]['collections'];"
        "_import_ahead('bf16');"
        "print(gc.get_stats()[2]['collections'] - before, gc.get_freeze_count() > 100_000, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "True", "True"]


def test_a_function_that_cannot_travel_names_the_test_that_asked():
    lock = threading.Lock()

    def build():
        return lock

    with pytest.raises(SettingsError, match=r"cannot be sent to the arm's process \(asked by test_mine\)") as error:
        Workload(build=build, batch=make_batch).ship("test_mine")
    assert "lock" in str(error.value)


def test_call_runs_a_users_function_on_the_live_model(arm):
    count = unship(arm.request("call", function=ship(lambda model: sum(p.numel() for p in model.parameters()), "f")))
    assert count == 32 * 64 + 64 + 64 * 32 + 32
