"""Real arms in real processes, on a CPU: what each failure becomes, and that nothing stays behind."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.arms import all_end, running, spec
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.left_behind import MARK
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.ranks import RankedProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm():
    process = ArmProcess(fork=True)
    process.build(spec())
    yield process
    process.close()


@pytest.fixture
def fresh(request):
    """A process that is no arm yet: a fork, or with the mark ``either_way`` an interpreter of its own too."""
    process = ArmProcess(fork=getattr(request, "param", True))
    yield process
    process.close()


either_way = pytest.mark.parametrize("fresh", [False, True], ids=["interpreter", "fork"], indirect=True)


def call(arm, function):
    """What ``function()`` gives inside the arm."""
    return unship(arm.request("call", function=ship(lambda model: function(), "a function")))


# -- what an arm answers ------------------------------------------------------------------------------------------


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


def test_losses_that_are_not_finite_reach_pytest_as_they_are(fresh):
    for loss, is_so in ((not_a_number, math.isnan), (infinite, math.isinf)):
        fresh.build(spec(loss=loss))
        assert is_so(fresh.request("curve", seed=0, steps=1)["losses"][0])


def test_call_runs_a_users_function_on_the_live_model(arm):
    count = unship(arm.request("call", function=ship(lambda model: sum(p.numel() for p in model.parameters()), "f")))
    assert count == 32 * 64 + 64 + 64 * 32 + 32


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


def test_a_fork_has_the_import_path_of_now(tmp_path, monkeypatch):
    (tmp_path / "lies_there.py").write_text("VALUE = 8")
    monkeypatch.syspath_prepend(tmp_path)
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        parent, value = call(arm, lambda: (os.getppid(), __import__("lies_there").VALUE))
    finally:
        arm.close()
    assert value == 8
    assert parent != os.getpid(), "the fork server's child"


def test_a_variable_that_deepspeed_sets_when_it_is_imported_makes_no_fork_an_interpreter(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        parent, seen = call(arm, lambda: (os.getppid(), os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]))
    finally:
        arm.close()
    assert seen == "1"
    assert parent != os.getpid(), "the fork server's child"


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_an_exception_in_the_arm_is_quoted_and_the_arm_lives_on(arm):
    with pytest.raises(ArmError, match="unknown operation 'dance'") as error:
        arm.request("dance")
    assert error.value.kind == "raised"
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
    assert error.value.kind == "died"
    assert not running(fresh.pid)
    assert all_end(child)


@either_way
def test_an_arm_that_died_before_it_was_asked_is_one_error(fresh):
    os.kill(fresh.pid, signal.SIGKILL)
    assert all_end(fresh.pid)
    with pytest.raises(ArmError, match="died of SIGKILL") as error:
        fresh.request("layers")
    # Else pytest shows the broken connection above it.
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


@either_way
def test_an_arm_that_exits_shows_the_end_of_its_output(fresh):
    def build():
        print("through Python", flush=True)
        os.system("echo through the shell; echo as an error >&2")
        os._exit(3)

    with pytest.raises(ArmError, match="exited with 3") as error:
        fresh.build(spec(build=build))
    for line in ("through Python", "through the shell", "as an error"):
        assert line in error.value.seen


def hang(model):
    time.sleep(600)


@either_way
def test_an_arm_that_hangs_is_stopped_and_says_where_it_was(fresh):
    fresh.build(spec())  # however long this machine takes to import, the arm hangs where it is told to
    with pytest.raises(ArmError, match="no answer to 'call' in 3 s") as error:
        fresh.request("call", timeout=3, function=ship(hang, "a function"))
    assert error.value.kind == "hung"
    assert "in hang" in str(error.value), "the stack of the place it hung in"
    assert not running(fresh.pid)


def test_a_request_before_the_last_ones_answer_is_refused(arm):
    arm.send("curve", seed=0, steps=1)
    with pytest.raises(RuntimeError, match="asked to 'layers' before it answered to 'curve'"):
        arm.send("layers")
    assert arm.receive()["losses"]


def test_whether_an_answer_is_there_is_known_without_waiting(arm):
    assert not arm.has_answered
    arm.send("call", function=ship(lambda model: time.sleep(0.5), "a function"))
    assert not arm.has_answered
    assert multiprocessing.connection.wait([arm], 30) == [arm]
    assert arm.has_answered
    arm.receive()
    assert not arm.has_answered


def test_nobody_waits_for_a_process_that_died(fresh):
    os.kill(fresh.pid, signal.SIGKILL)
    multiprocessing.connection.wait([fresh], 30)
    assert fresh.has_answered


@pytest.mark.parametrize(("each", "all_have"), [((True, True), True), ((True, False), False), ((False, True), False)])
def test_ranks_have_answered_once_all_have(each, all_have):
    process = RankedProcess(2, fork=True)
    with_ranks, process.ranks = process.ranks, [SimpleNamespace(has_answered=one) for one in each]
    try:
        assert process.has_answered is all_have
    finally:
        process.ranks = with_ranks
        process.close()


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
    assert error.value.kind == "out of memory"
    assert "smaller batch" in str(error.value)


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


def test_sizes_that_are_no_multiple_of_16_are_skipped_with_the_reason(fresh):
    fresh.build(spec(build=odd_model))
    layers = fresh.request("layers")
    assert layers["converted"] == ["2"]
    assert layers["skipped"]["0"] == "size: out_features=10 is not a multiple of 16"
    assert layers["skipped"]["1"] == "size: in_features=10 is not a multiple of 16"


# -- nothing stays behind -----------------------------------------------------------------------------------------


@either_way
def test_closing_ends_the_whole_group_and_its_log(fresh):
    fresh.build(spec())
    child = call(fresh, lambda: subprocess.Popen(["sleep", "600"]).pid)
    log = fresh.log
    assert running(child)
    fresh.close()
    fresh.close()
    assert not running(fresh.pid)
    assert all_end(child)
    assert not log.exists()


def parent(ending):
    """The output of a process that starts two arms, one of them a fork, prints their pids and logs, and then ends."""
    code = f"""
        import os, signal
        from pytest_fp8.arms.process import ArmProcess
        arms = [ArmProcess(fork=fork) for fork in (True, False)]
        print(*(arm.pid for arm in arms), *(arm.log for arm in arms), flush=True)
        {ending}
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)


def test_no_arm_outlives_a_parent_that_was_killed():
    done = parent("os.kill(os.getpid(), signal.SIGKILL)")
    *pids, _, _ = done.stdout.split()
    assert len(set(pids)) == 2
    assert all_end(*pids)


def test_no_arm_outlives_a_parent_that_closed_nothing():
    done = parent("")
    one, other, *logs = done.stdout.split()
    assert not running(one)
    assert not running(other)
    assert not any(Path(log).exists() for log in logs)
    assert not done.stderr


def test_no_arm_is_left_when_a_session_has_ended(pytester):
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.fp8(model="micro", backend="torchao", recipe="tensorwise", emulated=True)
        def test_layers(fp8_pair):
            fp8_pair.assert_layers()
            arms = (fp8_pair.fp8, fp8_pair.bf16)
            print("PIDS", *(arm.call(lambda model: os.getpid()) for arm in arms))
        """
    )
    result = pytester.runpytest_subprocess("-s", "-p", "no:benchmark")
    result.assert_outcomes(passed=1)
    line = next(line for line in result.outlines if "PIDS" in line)
    pids = line.split("PIDS")[1].split()
    assert len(set(pids)) == 2
    assert not any(map(running, pids))


def test_imports_look_for_no_garbage_and_later_collections_skip_what_they_made():
    program = (
        "import gc; from pytest_fp8.worker.main import import_ahead; before = gc.get_stats()[2]['collections'];"
        "import_ahead('bf16');"
        "print(gc.get_stats()[2]['collections'] - before, gc.get_freeze_count() > 100_000, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "True", "True"]


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
