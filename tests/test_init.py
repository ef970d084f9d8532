"""``pytest-fp8 init`` writes a first test file that runs as it is, and overwrites none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_fp8.cli import main


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pytest_of(*arguments):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", "-rs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ})
    return done.returncode, done.stdout + done.stderr


def test_a_file_is_written_and_pytest_collects_it(tmp_path, capsys):
    assert main(["init"]) == 0
    assert "pytest test_fp8.py" in capsys.readouterr().out
    code, said = pytest_of("--collect-only", "-q")
    assert code == 0, said
    assert "test_fp8.py::test_emulated[own-torchao-tensorwise-emulated]" in said
    assert "test_fp8.py::test_on_a_gpu[own-torchao-tensorwise]" in said


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "test_fp8.py").write_text("mine")
    assert main(["init"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "test_fp8.py").read_text() == "mine"


def test_a_folder_that_is_missing_is_made(tmp_path):
    assert main(["init", "tests/fp8/test_fp8.py"]) == 0
    assert (tmp_path / "tests/fp8/test_fp8.py").is_file()


@pytest.mark.parametrize(
    ("name", "says"), [("fp8.py", "would not collect"), ("a_file/test_fp8.py", "cannot be written")]
)
def test_a_name_that_is_of_no_use_is_refused(name, says, tmp_path, capsys):
    (tmp_path / "a_file").write_text("mine")
    assert main(["init", name]) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]
