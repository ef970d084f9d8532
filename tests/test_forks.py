"""Arms that are forked from one server with the libraries imported: what a fork may do, and whose the server is."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path

import pytest

from helpers.arms import call, fresh_process, live_arm, spec
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.scratch import MARK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm():
    with live_arm() as process:
        yield process


@pytest.fixture
def fresh(request):
    with fresh_process(request) as process:
        yield process


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
