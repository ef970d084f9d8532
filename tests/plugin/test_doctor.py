"""``pytest-fp8 doctor``: what it says of a machine, with a GPU of our own making and on this one."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.fakes import H200
from pytest_fp8 import gpu as gpus
from pytest_fp8 import libraries
from pytest_fp8.cli import main
from pytest_fp8.codes import R
from pytest_fp8.libraries import wanted

ROOT = Path(__file__).parents[2]
VERSIONS = {"torch": "2.11.0", "transformers": "5.17.0", "torchao": "0.18.0", "transformer-engine": "2.20.2"}


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``doctor(gpu, ...)``: the exit code and what is printed, on such a machine."""

    def asked(gpu=H200, versions=VERSIONS, imported="pass"):
        monkeypatch.setattr("pytest_fp8.doctor.IMPORT", imported)
        monkeypatch.setattr(gpus, "detect", lambda: (gpu, "" if gpu else "no NVIDIA GPU"))
        there = {name: version for name, version in versions.items() if version}

        def version(package):
            return there[package] if package in there else missing(package)

        def missing(package):
            raise libraries.PackageNotFoundError(package)

        monkeypatch.setattr("importlib.metadata.version", version)
        monkeypatch.setattr(libraries, "version", version)
        code = main(["doctor"])
        printed = capsys.readouterr().out
        assert ("no problems" in printed) is (code == 0)
        return code, printed

    return asked


def test_a_machine_with_a_hopper_gpu_is_described(doctor):
    code, printed = doctor()
    assert code == 0
    assert "--fp8-gpu=h200" in printed
    assert "torchao: tensorwise, rowwise, rowwise_with_gw_hp\n" in printed


def test_a_library_that_is_there_and_cannot_be_imported_is_a_problem(doctor):
    code, printed = doctor(imported="raise ImportError('undefined symbol: _ZN3c10')")
    assert code == 1
    assert "FP8-R38: torchao cannot be imported: ImportError: undefined symbol: _ZN3c10" in printed


def test_recipes_follow_the_capability(doctor):
    gpu = replace(H200, name="NVIDIA L40S", capability=(8, 9))
    assert "torchao: tensorwise; rowwise needs compute capability 9.0 or newer" in doctor(gpu)[1]


def test_without_a_gpu_it_says_what_runs_there(doctor):
    code, printed = doctor(gpu=None)
    assert "emulated=True run on the CPU" in printed
    assert "rowwise_with_gw_hp, emulated on the CPU" in printed
    assert code == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gpu": replace(H200, name="NVIDIA A100", capability=(8, 0))}, "no FP8 tensor cores"),
        ({"versions": {**VERSIONS, "torchao": "0.9.0", "transformer-engine": ""}}, "torchao 0.9.0 is older than 0.14"),
        (
            {"versions": {"torch": "2.11.0", "transformers": "5.17.0"}},
            f"{R.NOT_INSTALLED}: nothing here computes",
        ),
        ({"versions": {"torchao": "0.18.0", "transformers": "5.17.0"}}, f"{R.NOT_INSTALLED}: torch is not installed"),
    ],
)
def test_what_is_in_the_way_is_a_problem_and_exit_code_1(doctor, wrong, says):
    code, printed = doctor(**wrong)
    assert code == 1
    assert says in printed


def test_the_command_of_a_library_is_what_the_extra_of_it_brings():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, package in (("te", "transformer-engine"), ("torchao", "torchao"), ("unsloth", "unsloth")):
        assert shlex.split(wanted(package)) == extras[extra]
    assert wanted("no-such-package-at-all") == "no-such-package-at-all"
