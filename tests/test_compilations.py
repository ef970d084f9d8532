"""How often torch.compile compiles is counted without loading it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CODE = """
import sys
from pytest_fp8.worker.record.clock import compiled_frames

counts = [compiled_frames(), "torch._dynamo" in sys.modules]
import torch

compiled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
for length in (3, 3, 4, 4):
    compiled(torch.ones(length))
    counts.append(compiled_frames())
print(counts)
"""


@pytest.mark.nightly
def test_each_compilation_counts_once():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[0, False, 1, 1, 2, 2]"
