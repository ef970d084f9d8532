"""torch's processes for compilation: they start ahead, and an arm that was built has none that still start."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time

import pytest

from helpers.arms import all_end, make_model, running, spec
from helpers.fakes import H200, FakeProcess, install
from pytest_fp8 import Case
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.shipping import ship, unship
from pytest_fp8.worker import compilers, main

# torch starts them where Triton is installed, which is said here of a CPU's torch, too.
STARTS = """
import os, sys, time
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "{threads}"
import torch._inductor.async_compile as torchs
torchs.has_triton_package = lambda: True
from pytest_fp8.worker import compilers
before = time.perf_counter()
compilers.start()
ready = torchs.AsyncCompile._ready_future
took = compilers.wait()
print(bool(torchs._pool_set), ready is not None and ready.done(), took > 0.2)
"""


def said_by(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


@pytest.mark.nightly
@pytest.mark.slow
def test_where_torch_may_compile_in_one_thread_none_are_started():
    assert said_by(STARTS.format(threads=1)) == ["False"] * 3


IMPORTS = """
import sys
import torch
torch.cuda.is_available = lambda: {gpu}
from pytest_fp8.worker import compilers, main
def start():
    print("started", "transformers" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
compilers.start = start
main.import_ahead("torchao")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "said"), [(True, ["started", "False", "False"]), pytest.param(False, [], marks=pytest.mark.nightly)]
)
def test_an_arm_on_a_gpu_starts_them_before_its_other_imports(gpu, said):
    assert said_by(IMPORTS.format(gpu=gpu)) == said


def test_an_arm_on_the_cpu_of_a_machine_with_a_gpu_starts_none(monkeypatch):
    install(monkeypatch, H200)
    given = []
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", lambda *how: given.append(how[3]) or FakeProcess())
    pool = ArmPool(H200)
    case = Case("tiny", "torchao", "tensorwise")
    for device in ("cuda", "cpu"):
        pool._new_process(ArmSpec(case, device)).close()
    pool.close()
    assert given == ["cuda", "cpu"]


@pytest.mark.parametrize(
    "imports",
    ["", pytest.param("import torch._inductor.async_compile as torchs;", marks=pytest.mark.nightly)],
    ids=["none", "unused"],
)
def test_where_nothing_compiles_none_are_started_and_none_waited_for(imports):
    program = (
        f"import sys; {imports} from pytest_fp8.worker import compilers; took = compilers.wait();"
        "torchs = sys.modules.get('torch._inductor.async_compile');"
        "print(took < 0.1, bool(torchs and torchs._pool_set))"
    )
    assert said_by(program) == ["True", "False"]


def test_a_release_of_torch_without_these_processes_is_not_waited_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", object())
    assert compilers.wait() < 0.1


def test_a_process_says_that_it_imports_nothing_more_once_these_do_not_either(monkeypatch, tmp_path):
    ready = threading.Event()
    monkeypatch.setattr(compilers, "wait", ready.wait)
    imported = tmp_path / "imported"
    telling = threading.Thread(target=main._tell, args=(imported,))
    telling.start()
    time.sleep(0.05)
    assert not imported.exists()
    ready.set()
    telling.join()
    assert imported.exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_an_arm_that_is_built_has_none_that_still_start():
    def build():
        # As the first compiled step does, where no process was started ahead.
        import torch._inductor.async_compile as torchs

        torchs.has_triton_package = lambda: True
        torchs.config.compile_threads = 2
        torchs.AsyncCompile._get_ready = functools.partial(time.sleep, 4)
        torchs.maybe_warm_pool()
        return make_model()

    def state(model):
        import torch._inductor.async_compile as torchs

        (pool,) = torchs._pool_set
        return torchs.AsyncCompile._ready_future.done(), pool.process.pid

    process = ArmProcess(fork=True)
    try:
        facts = process.build(spec(build=build))
        ready, child = unship(process.request("call", function=ship(state, "a function")))
        assert ready
        assert facts["seconds"]["compilers"] > 0.2, "the wait is in the account of the build"
        assert running(child)
    finally:
        process.close()
    assert all_end(child), "they end with their arm"
