"""What is read of the host's processors while blocks are timed, and where the system says nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_fp8.questions.speed.host import Host
from pytest_fp8.worker.watch import processors

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
    found = processors.read(proc(cpu, 1_500_000_000, 500_000_000))
    assert found[1:] == (20.0, 3.0, 2.0), "neither idle time nor waits for a disk; a guest's is in the user's"


@pytest.mark.parametrize("cpu", ["", "a b c", "1 2"])
def test_a_system_that_says_less_has_zeros(proc, cpu):
    found = processors.read(proc(cpu))
    assert found.stolen == found.waited == 0.0
    assert found.wall > 0


def test_a_system_without_proc_has_zeros(tmp_path):
    assert processors.read(tmp_path)[1:] == (0.0, 0.0, 0.0)


def test_a_thread_that_is_kept_from_its_processor_is_seen():
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        with processors.watched() as host:
            children = [subprocess.Popen([sys.executable, "-c", "sum(range(20_000_000))"]) for _ in range(2)]
            while any(child.poll() is None for child in children):
                sum(range(100_000))
    finally:
        os.sched_setaffinity(0, mine)
    found = host()
    assert 0.2 * found["wall"] < found["waited"] < found["wall"]
    assert Host(**found).waited_share > 0.2


def test_shares_are_of_what_was_asked_for():
    quiet = Host(wall=10.0, used=20.0)
    assert (quiet.stolen_share, quiet.waited_share) == (0.0, 0.0)
    held = quiet + Host(wall=10.0, used=16.0, stolen=4.0, waited=2.0)
    assert (held.stolen_share, held.waited_share) == (0.1, 0.1)
    assert (Host().stolen_share, Host().waited_share) == (0.0, 0.0)
