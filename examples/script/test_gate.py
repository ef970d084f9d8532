"""The same train.py as it is: two runs of it, held at their steps. Nothing in it is imported."""

import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).with_name("train.py")


@pytest.mark.fp8_script(
    [sys.executable, TRAIN, "--steps", "5000", "--seed", "0"], fp8=["--fp8"], share=0.9, emulated=True
)
def test_script(fp8_script):
    fp8_script()
