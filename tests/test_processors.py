"""What is read of the host's processors while blocks are timed, and where the system says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_fp8.questions.speed.host import scattered
from pytest_fp8.worker.record import clock

pytestmark = pytest.mark.slow

SECOND = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path):
    """A folder like ``/proc`` of a process with these threads' waits in nanoseconds."""

    def make(cpu, *waits):
        (tmp_path / "stat").write_text(f"cpu  {cpu}\ncpu0 {cpu}\nintr 1\n")
        for number, wait in enumerate(waits):
            (tmp_path / f"self/task/{number}").mkdir(parents=True)
            (tmp_path / f"self/task/{number}/schedstat").write_text(f"987654321 {wait} 12\n")
        return tmp_path

    return make


def test_processor_time_is_that_of_the_machine_and_waits_are_those_of_all_threads(proc):
    cpu = " ".join(str(each * SECOND) for each in (10, 2, 5, 1000, 50, 1, 2, 3, 7, 0))
    found = clock.read_host(proc(cpu, 1_500_000_000, 500_000_000))
    assert found[1:] == (20.0, 3.0, 2.0), "neither idle time nor waits for a disk; a guest's is in the user's"


@pytest.mark.parametrize("stat", ["", "cpu\n", "cpu  a b c\n", "cpu  1 2\n", "intr 1\n"])
def test_a_system_that_says_less_has_zeros(proc, stat):
    folder = proc("")
    (folder / "stat").write_text(stat)
    found = clock.read_host(folder)
    assert found.stolen == found.waited == 0.0
    assert found.wall > 0


def test_a_system_without_proc_has_zeros(tmp_path):
    assert clock.read_host(tmp_path)[1:] == (0.0, 0.0, 0.0)


def test_a_thread_that_is_kept_from_its_processor_is_seen():
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        with clock.host_watched() as host:
            children = [subprocess.Popen([sys.executable, "-c", "sum(range(20_000_000))"]) for _ in range(2)]
            while any(child.poll() is None for child in children):
                sum(range(100_000))
    finally:
        os.sched_setaffinity(0, mine)
    found = host()
    assert 0.2 * found["wall"] < found["waited"] < found["wall"]


def test_blocks_that_scatter_are_told():
    bf16, fp8 = [[100.0, 101.0, 99.0, 100.0] * 2], [[80.0, 95.0, 81.0, 82.0, 99.0, 81.0, 98.0, 97.0]]
    assert scattered(bf16, fp8) == "FP8's blocks 80.0 to 99.0 ms a step, BF16's blocks 99.0 to 101.0 ms a step"
    assert scattered(bf16, bf16) == ""
