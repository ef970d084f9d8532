"""The command line as a whole: its version, a signal, what it loads, and GPUs that nobody knows."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fp8.cli import main
from pytest_fp8.libraries import documentation

ROOT = Path(__file__).parents[2]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("pytest-fp8 ")


def test_the_module_is_the_command_and_its_help_has_an_example_and_the_documentation():
    done = subprocess.run([sys.executable, "-m", "pytest_fp8", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: pytest-fp8 ")
    assert f"documentation: {documentation()}" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_in_order(tmp_path, number):
    code = (
        "import os, signal, sys; from pytest_fp8 import cli; from pytest_fp8.arms.scratch import temporary_folder\n"
        "def run(options):\n"
        f"    with temporary_folder('x-') as made: print(made, flush=True); os.kill(os.getpid(), {int(number)})\n"
        "cli.add_doctor = lambda commands: commands.add_parser('doctor').set_defaults(run=run)\n"
        "sys.exit(cli.main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    by = "SIGTERM" if number is signal.SIGTERM else "Ctrl-C"
    assert done.stderr == f"pytest-fp8: ended by {by}, without an answer\n"
    assert not Path(done.stdout.strip()).exists()


def test_the_command_line_loads_neither_torch_nor_numpy():
    code = (
        "import sys; from pytest_fp8.cli import main; main(['baselines', 'list']);"
        "main(['baselines', 'diff']);"
        "print([name for name in ('torch', 'numpy', 'pytest', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
