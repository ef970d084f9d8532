"""``pytest-fp8 init``: writes a first test file, which runs as it is and into which a user's own model goes."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pytest_fp8.baselines.atomic import write_atomically
from pytest_fp8.codes import R
from pytest_fp8.errors import BaselineError, refuse

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
    """Against another commit (--fp8-base-git=origin/main), or against stored baselines (--fp8-update-baselines)."""
    fp8_pair.assert_speedup()
'''


HELP = "write a first test file for your own model"


def add_init(commands: Any) -> None:
    """Add the command to the parser of :mod:`pytest_fp8.cli`."""
    add = commands.add_parser("init", help=HELP, description=f"{HELP[0].upper()}{HELP[1:]}. No file is overwritten.")
    add.add_argument("file", type=Path, nargs="?", default=Path("test_fp8.py"), help="default: test_fp8.py")
    add.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file. Raises :class:`Fp8Error` where it cannot, or where there is one."""
    file: Path = options.file
    _require_a_name(file)
    folders = [folder for folder in file.parents if not os.path.exists(folder)]
    try:
        write_atomically(file, TEXT)
    except BaselineError:
        # Folders that were made for it, the innermost first.
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    command = shlex.join(["pytest", str(file)])
    print(f"wrote {file}. Without a GPU it runs as it is, emulated on the CPU:\n\n  {command}\n")
    print("Then put your own model, batch and loss into build(), batch() and loss().")
    return 0


def _require_a_name(file: Path) -> None:
    """Raises :class:`SettingsError` for a name that pytest would not collect, or that is taken."""
    folder = os.path.isdir(file)
    if not any(fnmatch(file.name, pattern) for pattern in ("test_*.py", "*_test.py")):
        refuse(
            R.FILE_NAME,
            f"{file} is a folder" if folder else f"pytest would not collect {file.name}",
            expected="a file's name such as test_fp8.py",
            seen=f"{file}, a folder" if folder else str(file),
            cause="init writes one file, whose name it takes" if folder else "it collects test_*.py and *_test.py",
            next_step=_init(file / "test_fp8.py" if folder else file.with_name("test_fp8.py")),
        )
    # A link that leads nowhere is taken, too.
    if os.path.lexists(file):
        refuse(
            R.FILE_NAME,
            f"{file} is there already",
            expected="a name that is free",
            seen=f"{file}, a folder" if folder else str(file),
            cause="init never overwrites a file",
            next_step=_init(file.with_name("test_fp8_first.py")),
        )


def _init(file: Path) -> str:
    return shlex.join(["pytest-fp8", "init", str(file)])
