"""The same train.py as it is: two runs of it, held at their steps. Nothing in it is imported."""

import sys
from pathlib import Path

import pytest
from test_fp8 import SMALL

TRAIN = Path(__file__).with_name("train.py")


@pytest.mark.fp8_script([sys.executable, TRAIN, *SMALL, "--steps=5000"], fp8=["--fp8"], share=0.8, emulated=True)
def test_script(fp8_script):
    fp8_script()
