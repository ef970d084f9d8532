"""torch's processes for compilation: they start ahead, and an arm that was built has none that still start."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from multiprocessing import Pipe

import pytest

from helpers.fakes import H200, FakeProcess, install
from pytest_fp8 import Case
from pytest_fp8.arms.pool import ArmPool
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.worker import compilers, main


def said_by(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


IMPORTS = """
import sys
import torch
torch.cuda.is_available = lambda: True
from pytest_fp8.worker import compilers, main
def start():
    print("started", "transformers" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
compilers.start = start
main.import_ahead("torchao")
"""


@pytest.mark.slow
def test_an_arm_on_a_gpu_starts_them_before_its_other_imports():
    assert said_by(IMPORTS) == ["started", "False", "False"]


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


def test_where_nothing_compiles_none_are_started_and_none_waited_for():
    program = (
        "import sys; from pytest_fp8.worker import compilers; print(compilers.wait() < 0.1, 'torch' in sys.modules)"
    )
    assert said_by(program) == ["True", "False"]


def test_a_process_says_that_it_imports_nothing_more_once_these_do_not_either(monkeypatch):
    ready = threading.Event()
    monkeypatch.setattr(compilers, "wait", lambda: ready.wait() and 0.5)
    ours, theirs = Pipe()
    serving = threading.Thread(target=main.serve, args=(theirs, 1.0))
    serving.start()
    ours.send_bytes(json.dumps({"id": 1, "operation": "import", "arguments": {}}).encode())
    assert not ours.poll(0.05)
    ready.set()
    assert json.loads(ours.recv_bytes()) == {"id": 1, "result": 0.5}
    ours.close()
    serving.join()
