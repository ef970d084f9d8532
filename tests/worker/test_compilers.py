"""torch's processes for compilation: they start ahead, and an arm that was built has none that still start."""

from __future__ import annotations

import subprocess
import sys

import pytest


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


def test_where_nothing_compiles_none_are_started_and_none_waited_for():
    program = "import sys; from pytest_fp8.worker import compilers; print(compilers.wait(), 'torch' in sys.modules)"
    assert said_by(program) == ["None", "False"]
