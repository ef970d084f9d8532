"""CPU arms forked from one process that has imported their libraries: the same arms, and as little left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_arms import spec

from control_runner import ControlRunner
from helpers.fakes import H200, FakeProcess, install
from pytest_fp8 import ArmError, Case
from pytest_fp8.arms.environment import ArmEnvironment
from pytest_fp8.arms.forked import ForkedProcess, Template
from pytest_fp8.arms.pair import PairArms, make_arm
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess, FreshProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.options import Settings
from pytest_fp8.session import Session
from pytest_fp8.shipping import ship, unship

EMULATED = Case("micro", "torchao", "tensorwise", emulated=True)


def call(arm, function):
    """What ``function()`` gives inside the arm."""
    return unship(arm.request("call", function=ship(lambda model: function(), "a function")))


def state(pid):
    """The kernel's letter for a process; an empty string where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def soon_gone(*pids):
    deadline = time.monotonic() + 15
    while any(state(pid) not in ("", "Z") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(state(pid) not in ("", "Z") for pid in pids)


@pytest.fixture(scope="module")
def shared():
    """One template for all tests that do it no harm. Its variables are what they are when the first of them runs."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def own():
    """A template that may be harmed."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def arms():
    """``arms(template)``: an arm, closed afterwards."""
    made = []

    def make(template, backend="torchao", **how):
        made.append(ArmProcess(backend, template=template, **how))
        return made[-1]

    yield make
    for arm in made:
        arm.close()


def test_a_forked_arm_computes_what_a_fresh_one_computes_to_the_last_bit(shared, arms):
    answers = []
    for template, kind in ((None, FreshProcess), (shared, ForkedProcess), (shared, ForkedProcess)):
        arm = arms(template)
        assert isinstance(arm._process, kind)
        arm.build(ArmSpec(EMULATED, "cpu", threads=1))
        layers = arm.request("layers")
        answers.append((arm.request("curve", seed=1, steps=8), arm.request("logits", seed=0), layers["products"]))
    assert answers[0] == answers[1] == answers[2]


def killed(arm):
    arm.build(spec())
    threading.Timer(0.3, os.kill, (arm.pid, signal.SIGKILL)).start()
    arm.request("curve", seed=0, steps=100_000)


def left(arm):
    arm.build(spec(build=leave))


def leave():
    print("the last words", flush=True)
    sys.exit(3)


def hang(model):
    time.sleep(600)


@pytest.mark.parametrize(("happens", "said"), [(killed, "died of SIGKILL"), (left, "exited with 3")])
def test_the_end_of_a_forked_arm_is_told_in_the_words_of_a_fresh_one(shared, arms, happens, said):
    told = []
    for template, kind in ((None, FreshProcess), (shared, ForkedProcess)):
        arm = arms(template)
        assert isinstance(arm._process, kind)
        with pytest.raises(ArmError, match=said) as error:
            happens(arm)
        assert state(arm.pid) == ""
        # What libraries say while they are imported is no forked arm's output.
        told.append((error.value.kind, re.sub(r"(?s)seen: .*?(?=\n  \w+:)", "", str(error.value))))
    assert told[0] == told[1]


def test_the_last_words_of_a_forked_arm_are_shown_and_nobody_elses(shared, arms):
    talker, silent = arms(shared), arms(shared)
    talker.build(spec())
    silent.build(spec())
    call(talker, lambda: os.system("echo through the shell; echo and as an error >&2"))
    call(talker, lambda: print("through Python", flush=True))
    assert {"through the shell", "and as an error", "through Python"} <= set(talker.tail().splitlines())
    assert "through" not in silent.tail()
    with pytest.raises(ArmError, match="exited with 3") as error:
        arms(shared).build(spec(build=leave))
    assert "the last words" in str(error.value)
    assert "through" not in str(error.value)


def test_a_forked_arm_that_hangs_is_stopped_and_says_where_it_was(shared, arms):
    arm = arms(shared)
    arm.build(spec())
    with pytest.raises(ArmError, match="no answer to 'call' in 3 s") as error:
        arm.request("call", timeout=3, function=ship(hang, "a function"))
    assert error.value.kind == "hung"
    assert "in hang" in str(error.value)
    assert state(arm.pid) == ""


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="torch.compile on a CPU needs a compiler"
)
def test_a_forked_arm_can_compile(shared, arms):
    def compiled():
        import torch

        @torch.compile
        def twice(x):
            return (x + x).relu()

        return float(twice(torch.ones(8)).sum())

    arm = arms(shared)
    arm.build(spec())
    assert call(arm, compiled) == 16


def test_a_forked_arm_takes_its_group_with_it_and_keeps_its_pid_until_then(shared, arms):
    arm = arms(shared)
    arm.build(spec())
    child = call(arm, lambda: subprocess.Popen(["sleep", "600"]).pid)
    assert os.getpgid(child) == arm.pid
    os.kill(arm.pid, signal.SIGKILL)
    assert arm._process.wait(10) == -signal.SIGKILL
    assert not arm.alive
    assert state(arm.pid) == "Z", "the pid can be nobody else's yet"
    assert state(child) not in ("", "Z"), "what it started ends with its group, when that is closed"
    arm.close()
    assert state(arm.pid) == ""
    assert soon_gone(child)
    assert not arm.log.exists()
    arm.close()


def test_a_closed_arm_that_did_nothing_wrong_is_gone_too(shared, arms):
    arm = arms(shared)
    assert arm.alive
    arm.close()
    assert state(arm.pid) == ""


def test_arms_draw_different_numbers_where_fresh_ones_would(shared, arms):
    def draw():
        import random

        import numpy

        return numpy.random.random(), random.random()

    one, two = arms(shared), arms(shared)
    for arm in (one, two):
        arm.build(spec())
    assert not set(call(one, draw)) & set(call(two, draw))


def test_a_forked_arm_is_where_pytest_is(shared, arms, tmp_path, monkeypatch):
    arms(shared)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lies_here.py").write_text("VALUE = 7")
    arm = arms(shared)
    arm.build(spec())
    assert isinstance(arm._process, ForkedProcess)
    assert call(arm, os.getcwd) == str(tmp_path)
    assert call(arm, lambda: __import__("lies_here").VALUE) == 7


def test_the_name_of_the_test_is_no_other_environment(shared, arms, monkeypatch):
    arms(shared)
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another (call)")
    arm = arms(shared)
    arm.build(spec())
    assert isinstance(arm._process, ForkedProcess)
    assert call(arm, lambda: os.environ["PYTEST_CURRENT_TEST"]) == "another (call)"


def test_a_folder_that_is_gone_is_no_error(shared, arms, tmp_path, monkeypatch):
    before = arms(shared)
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    arm = arms(shared)
    assert isinstance(arm._process, FreshProcess)
    assert "folder is gone" in arm.not_forked
    assert before.alive


def test_another_environment_or_import_path_gets_a_fresh_interpreter(shared, arms, tmp_path, monkeypatch):
    assert isinstance(arms(shared)._process, ForkedProcess)
    with monkeypatch.context() as patch:
        patch.setenv("MINE", "new")
        arm = arms(shared)
        arm.build(spec())
        assert isinstance(arm._process, FreshProcess)
        assert call(arm, lambda: os.environ["MINE"]) == "new"
        assert "environment variables" in arm.not_forked
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert isinstance(arms(shared)._process, FreshProcess)
    assert isinstance(arms(shared)._process, ForkedProcess), "as it was"


def test_neither_another_interpreter_nor_a_library_that_patches_others_is_forked(own, arms):
    elsewhere = ArmEnvironment("base", sys.executable, ())
    assert isinstance(arms(own, environment=elsewhere)._process, FreshProcess)
    assert isinstance(arms(own, "unsloth")._process, FreshProcess)
    assert own.pid is None, "nothing was even started"


@pytest.fixture
def in_templates(tmp_path, monkeypatch):
    """``in_templates(code)``: what a template runs before anything else."""

    def add(code):
        only = f"import sys\nif 'pytest_fp8.arms.template' in sys.orig_argv:\n    {code}"
        (tmp_path / "sitecustomize.py").write_text(only)
        monkeypatch.syspath_prepend(tmp_path)

    return add


def test_a_template_with_threads_of_its_own_forks_nothing(own, arms, in_templates):
    in_templates("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()")
    arm = arms(own)
    assert isinstance(arm._process, FreshProcess)
    assert "2 threads" in arm.not_forked


def test_a_template_that_cannot_import_leaves_the_error_to_the_arm(own, arms, in_templates):
    in_templates("sys.modules['torch'] = None")
    arm = arms(own)
    assert isinstance(arm._process, FreshProcess)
    assert "it is gone" in arm.not_forked
    assert arm.build(spec())["libraries"]


def test_after_its_template_was_killed_an_arm_is_dead_and_the_next_one_is_built(own, arms):
    first = arms(own)
    first.build(spec())
    os.kill(own.pid, signal.SIGKILL)
    with pytest.raises(ArmError, match="died of SIGKILL"):
        first.request("curve", seed=0, steps=100_000)
    second = arms(own)
    assert isinstance(second._process, FreshProcess)
    assert "does not answer" in second.not_forked
    second.build(spec())
    assert second.request("curve", seed=0, steps=1)["losses"]


def test_a_template_that_does_not_answer_is_given_up(own, arms, monkeypatch):
    arms(own)
    os.kill(own.pid, signal.SIGSTOP)
    monkeypatch.setattr("pytest_fp8.arms.forked.FORK_SECONDS", 0.5)
    arm = arms(own)
    assert isinstance(arm._process, FreshProcess)
    assert soon_gone(own.pid), "it will not come back and fork an arm onto the same pipes"


def test_nothing_outlives_a_parent_that_was_killed(tmp_path):
    code = """
        import os, signal
        from pytest_fp8.arms.forked import Template
        from pytest_fp8.arms.process import ArmProcess
        template = Template()
        print(*(ArmProcess(template=template).pid for _ in range(2)), template.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(set(pids)) == 3
    assert soon_gone(*pids)


def test_nothing_outlives_a_process_that_closed_nothing():
    code = """
        from pytest_fp8.arms.forked import Template
        from pytest_fp8.arms.process import ArmProcess
        template = Template()
        arms = [ArmProcess(template=template) for _ in range(2)]
        print(*(arm.pid for arm in arms), template.pid, *(arm.log for arm in arms), flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    *pids, one, two = done.stdout.split()
    assert [state(pid) for pid in pids] == ["", "", ""]
    assert not Path(one).exists()
    assert not Path(two).exists()
    assert not done.stderr


def test_nobody_is_left_when_a_session_has_ended(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8.arms.forked import ForkedProcess
        from pytest_fp8.session import SESSION

        @pytest.mark.fp8(model="micro", backend="torchao", recipe="tensorwise", emulated=True)
        def test_layers(fp8_pair, request):
            fp8_pair.assert_layers()
            pool = request.config.stash[SESSION].pool()
            assert all(isinstance(arm._process, ForkedProcess) for arm in pool._processes.values())
            print("PIDS", pool.template.pid, *pool.pids)
        """
    )
    result = pytester.runpytest_subprocess("-s", "-p", "no:benchmark")
    result.assert_outcomes(passed=1)
    line = next(line for line in result.outlines if "PIDS" in line)
    pids = [int(word) for word in line.split("PIDS")[1].split()]
    assert len(pids) == 3
    assert [state(pid) for pid in pids] == ["", "", ""]


# -- who forks, with arms that are fakes --------------------------------------------------------------------------


def test_beside_a_gpu_there_is_nothing_to_fork_from(monkeypatch):
    install(monkeypatch, H200)
    session = Session(Settings(), Path(), is_worker=False)
    assert session.pool().template is None
    pair = PairArms(EMULATED, session.pool(), None)
    pair.start()
    assert [process.template for process in session.pool()._processes.values()] == [None, None]
    session.close()


def test_without_a_gpu_arms_on_the_cpu_are_forked_and_no_others(monkeypatch):
    install(monkeypatch, None)
    session = Session(Settings(), Path(), is_worker=False)
    pool = session.pool()
    PairArms(EMULATED, pool, None).start()
    assert [process.template for process in pool._processes.values()] == [pool.template] * 2
    on_gpu = make_arm(Case("tiny", "torchao", "tensorwise"), pool, None, "")
    assert pool.live(on_gpu).template is None
    assert pool.template.pid is None, "started when a process is forked, and fakes fork none"
    session.close()


def test_controls_fork_from_the_sessions_own_template(monkeypatch):
    install(monkeypatch, None)
    monkeypatch.setattr("control_runner.ArmProcess", FakeProcess)
    pool = ArmPool(None, template=Template())
    runner = ControlRunner(Settings(), lambda: pool)
    runner.pair_of(EMULATED)
    assert [process.template for _, process in runner._small._held.values()] == [pool.template] * 2
    runner.close()
    assert not pool.template._refusal, "it was the session's and still is"


def test_what_kept_an_arm_from_being_forked_is_among_its_facts(monkeypatch):
    install(monkeypatch, None)
    pool = ArmPool(None)
    monkeypatch.setattr(FakeProcess, "__init__", _noting(FakeProcess.__init__))
    pair = PairArms(EMULATED, pool, None)
    pair.start()
    assert pair.fp8.facts["not forked"] == "two threads"
    pool.close()


def _noting(made):
    def init(self, *arguments, **named):
        made(self, *arguments, **named)
        self.not_forked = "two threads"

    return init


def test_a_thread_counts_unless_it_takes_part_in_forks():
    """pandas 3 brings pyarrow, whose allocator has a thread: no reason to start each arm as a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COUNTED)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["1", "0"]


COUNTED = """
import ctypes, threading
from pytest_fp8.arms.template import threads

def thread(name):
    def run():
        ctypes.CDLL(None).prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        ready.set()
        end.wait()
    ready, end = threading.Event(), threading.Event()
    started = threading.Thread(target=run)
    started.start()
    ready.wait()
    found = threads()
    end.set()
    started.join()
    return found

before = threads()
print(thread(b"worker") - before, thread(b"jemalloc_bg_thd") - before)
"""
