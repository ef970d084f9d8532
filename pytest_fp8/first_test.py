"""``pytest-fp8 init``: writes a first test file, which runs as it is and into which a user's own model goes."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from pytest_fp8.codes import R
from pytest_fp8.errors import refuse

TEXT = '''\
"""FP8 training of my model: does it run in FP8, does it compute and learn as in BF16, is it faster?"""

import pytest
from torch import nn, randn

from pytest_fp8 import Workload


def build():
    """1. Your model: a new one in each call. FP8 takes Linears whose sizes are multiples of 16."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def batch(step):
    """2. Your data: one batch, a multiple of 16 rows or tokens."""
    return randn(128, 64)


def loss(model, x):
    """3. Your loss: a tensor with one element."""
    return (model(x) - x.sin()).square().mean()


@pytest.fixture
def fp8_workload():
    return Workload(build, batch, loss)


EMULATED = pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)  # on the CPU, where no GPU is used
ON_A_GPU = pytest.mark.fp8(backend="torchao", recipe="tensorwise")  # te, rowwise, ...: `pytest-fp8 doctor`


@EMULATED
def test_emulated(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@ON_A_GPU
def test_on_a_gpu(fp8_pair):
    fp8_pair.assert_faster()
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@ON_A_GPU
def test_no_slower_than_before(fp8_pair):
    """Against another commit (--fp8-base=origin/main), or against stored baselines (--fp8-update)."""
    fp8_pair.assert_speedup()
'''


HELP = "write a first test file for your own model"


def add_init(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("init", help=HELP, description=f"{HELP[0].upper()}{HELP[1:]}. No file is overwritten.")
    add.add_argument("file", type=Path, nargs="?", default=Path("test_fp8.py"), help="default: test_fp8.py")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file. Raises :class:`SettingsError` where it cannot, or where there is one."""
    file: Path = options.file
    try:
        with file.open("x") as stream:
            stream.write(TEXT)
    except OSError as error:
        refuse(
            R.FILE_NAME,
            f"{file} cannot be written",
            expected="a name that is free, such as test_fp8.py, in a folder that is there",
            seen=error.strerror or str(error),
            cause="init overwrites no file and makes no folder",
            next_step="pytest-fp8 init test_fp8_first.py",
        )
    command = shlex.join(["pytest", str(file)])
    print(f"wrote {file}. Without a GPU it runs as it is, emulated on the CPU:\n\n  {command}\n")
    print("Then put your own model, batch and loss into build(), batch() and loss().")
    return 0
