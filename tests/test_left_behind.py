"""Nothing of a real arm stays behind: neither its process, nor what it started, nor its log."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.arms import all_end, fresh_process, running

pytestmark = pytest.mark.slow


@pytest.fixture
def fresh(request):
    with fresh_process(request) as process:
        yield process


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


@pytest.mark.nightly
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
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("micro", "torchao", "tensorwise", emulated=True)])
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
