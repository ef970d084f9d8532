"""``pytest-fp8 suites`` and ``selftest``: run the suites that come with this package, in any folder.

pytest reads no configuration of the project in that folder: addopts, import mode and time limits are for its own tests.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "shipped"
"""Where a wheel has ``suites/`` and nothing else, so that the ids of its tests begin with ``suites/`` as in a clone."""

SELFTEST = (
    *("forward-only", "recipe-dropped", "layer-bypassed", "dgrad-x2", "wgrad-bf16", "loss-drift", "nan-step-40"),
    *("fp8-off", "half-batch-step", "stored-in-fp8", "optimizer-lost", "all-skipped"),
)
"""Controls, one of each kind of fault, that show a user that the gate can see on this machine."""


def add_suites(commands: Any) -> None:
    """Add the commands to the parser of :mod:`pytest_fp8.cli`."""
    controls = f"-k=test_control and ({' or '.join(f'[{name}]' for name in SELFTEST)})"
    for name, what, first in (
        ("suites", "run the suites of this package", []),
        ("selftest", "break FP8 training in a dozen ways: does the gate see them here?", [controls]),
    ):
        # No prefix of an option here begins with "-": all that follows is pytest's.
        add = commands.add_parser(name, help=f"{what}; takes pytest's options", prefix_chars="+", add_help=False)
        add.add_argument("arguments", nargs="*")
        add.set_defaults(run=run, first=first)


def run(options: argparse.Namespace) -> int:
    """Become pytest, whose exit code is then this command's. The current folder is its root: baselines and reports are
    read and written there."""
    # In a clone the suites lie beside the package.
    shipped = SHIPPED.is_dir()
    suites = (SHIPPED if shipped else PACKAGE.parent) / "suites"
    command = [sys.executable, "-P", "-m", "pytest", "-c", os.devnull, f"--rootdir={os.getcwd()}"]
    command += [f"--confcutdir={suites}", str(SHIPPED if shipped else suites), *options.first, *options.arguments]
    os.execv(sys.executable, command)
