"""``pytest-fp8 init`` writes a first test file that runs as it is, and overwrites none."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from pytest_fp8.cli import main
from pytest_fp8.codes import R


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


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("mine.py", "File exists"),
        ("link.py", "File exists"),
        ("src", "File exists"),
        ("gone/test_fp8.py", "No such file or directory"),
        ("mine.py/test_fp8.py", "Not a directory"),
    ],
)
def test_it_is_written_to_a_free_name_in_a_folder_that_is_there(name, seen, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("mine")
    (tmp_path / "link.py").symlink_to("nowhere.py")
    (tmp_path / "src").mkdir()
    before = sorted(tmp_path.iterdir())
    assert main(["init", name]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{R.FILE_NAME}: {name} cannot be written"
    assert [line.split()[0] for line in said[1:]] == ["expected:", "seen:", "cause:", "next:"]
    assert said[2].split("seen:")[1].strip() == seen
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "mine.py").read_text() == "mine"


def test_the_command_that_is_shown_is_quoted_for_a_shell(tmp_path, capsys):
    (tmp_path / "a b").mkdir()
    assert main(["init", named := "a b/größe.py"]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  pytest"))
    assert shlex.split(command) == ["pytest", named]


def test_a_name_that_the_output_cannot_encode_is_escaped(tmp_path):
    command = [sys.executable, "-m", "pytest_fp8.cli", "init", "größe.py"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"wrote gr\\xf6\\xdfe.py.")
    assert (tmp_path / "größe.py").is_file()
