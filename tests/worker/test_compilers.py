"""torch's processes for compilation: they start ahead, and an arm that was built has none that still start."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


PROGRAM = """
import sys
from pytest_fp8.worker import compilers, main
print(compilers.wait(), "torch" in sys.modules)
import torch
torch.cuda.is_available = lambda: True
def start():
    print("started", "transformers" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
compilers.start = start
main.import_ahead("torchao")
"""


def test_an_arm_on_a_gpu_starts_them_before_its_other_imports_and_none_is_waited_for_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False", "started", "False", "False"]
