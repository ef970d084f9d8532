"""The command line: its version, a signal, what it loads; what ``doctor`` says of a machine; which versions of a
library are recent enough."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200
from pytest_fp8 import gpu as gpus
from pytest_fp8 import libraries
from pytest_fp8.cli import main
from pytest_fp8.codes import R
from pytest_fp8.libraries import documentation, installed, wanted

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


# -- doctor, with a GPU of our own making and on this machine --------------------------------------------------------


VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "torchao": "0.18.0", "transformer-engine": "2.20.2"}


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``doctor(gpu, ...)``: the exit code and what is printed, on such a machine."""

    def asked(gpu=H200, versions=VERSIONS, imported="pass"):
        monkeypatch.setattr("pytest_fp8.doctor.IMPORT", imported)
        monkeypatch.setattr(gpus, "detect", lambda: (gpu, "" if gpu else "no NVIDIA GPU"))
        there = {name: version for name, version in versions.items() if version}

        def version(package):
            if package not in there:
                raise libraries.PackageNotFoundError(package)
            return there[package]

        monkeypatch.setattr("importlib.metadata.version", version)
        monkeypatch.setattr(libraries, "version", version)
        code = main(["doctor"])
        printed = capsys.readouterr().out
        assert ("no problems" in printed) is (code == 0)
        return code, printed

    return asked


@pytest.mark.parametrize(
    ("machine", "code", "says"),
    [
        ({}, 0, ["--fp8-gpu=h200", "torchao: tensorwise, rowwise, rowwise_with_gw_hp\n"]),
        ({"gpu": None}, 0, ["emulated=True run on the CPU", "rowwise_with_gw_hp, emulated on the CPU"]),
        (
            {"gpu": replace(H200, name="NVIDIA L40S", capability=(8, 9))},
            0,
            ["torchao: tensorwise; rowwise needs compute capability 9.0 or newer"],
        ),
        ({"gpu": replace(H200, name="NVIDIA A100", capability=(8, 0))}, 1, ["no FP8 tensor cores"]),
        ({"imported": "raise ImportError('undefined symbol: _ZN3c10')"}, 1, [f"{R.NOT_INSTALLED}: torchao", "_ZN3c10"]),
        (
            {"versions": {**VERSIONS, "torchao": "0.9.0", "transformer-engine": ""}},
            1,
            ["torchao 0.9.0 is older than 0.14"],
        ),
        ({"versions": {"torch": "2.11.0", "transformers": "5.17.0"}}, 1, [f"{R.NOT_INSTALLED}: nothing here computes"]),
        ({"versions": {"torchao": "0.18.0", "transformers": "5.17.0"}}, 1, [f"{R.NOT_INSTALLED}: torch is"]),
    ],
)
def test_a_machine_is_described_and_what_is_in_the_way_is_a_problem_and_exit_code_1(doctor, machine, code, says):
    ended, printed = doctor(**machine)
    assert ended == code
    assert [words for words in says if words not in printed] == []


def test_the_command_of_a_library_and_the_documentation_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, package in (("te", "transformer-engine"), ("torchao", "torchao"), ("unsloth", "unsloth")):
        assert shlex.split(wanted(package)) == project["optional-dependencies"][extra]
    assert wanted("no-such-package-at-all") == "no-such-package-at-all"
    assert documentation() == project["urls"]["Documentation"]


# -- versions of libraries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ("1.10", ""),
        ("1.10.0", ""),
        ("1.11rc1", ""),
        ("1.11.0.dev20261101", ""),
        ("1.10.post1", ""),
        ("1.10.0+cu128", ""),
        ("2.0", ""),
        ("1.9.2", " is older than 1.10"),
        ("1.10rc1", " is older than 1.10"),
        ("1.10.0.dev0", " is older than 1.10"),
        ("1.9.9.post1", " is older than 1.10"),
        ("1.9+cu128", " is older than 1.10"),
        ("main-abc", " has no version that can be compared with 1.10"),
    ],
)
def test_a_version_is_ordered_as_pep_440_says(monkeypatch, found, why):
    monkeypatch.setattr(libraries, "version", lambda package: found)
    assert installed("thing", "1.10") == (not why, f"thing {found}{why}")


def test_a_package_that_is_not_there_says_how_to_get_it():
    assert installed("no-such-package-at-all", "1")[1] == (
        "no-such-package-at-all is not installed: pip install no-such-package-at-all"
    )
