"""``pytest-fp8 init`` writes a first test file that runs as it is, and overwrites none."""

from __future__ import annotations

import errno
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [("src", "src/test_fp8.py"), (".", "test_fp8.py"), ("..", "../test_fp8.py"), ("/", "/test_fp8.py")],
)
def test_a_folder_is_told_the_file_to_write_into_it(given, meant, tmp_path, capsys):
    (tmp_path / "src").mkdir()
    assert main(["init", given]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{R.FILE_NAME}: {given} is a folder"
    assert [line.split()[0] for line in said[1:]] == ["expected:", "seen:", "cause:", "next:"]
    assert said[-1].split("next:")[1].strip() == f"pytest-fp8 init {meant}"
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("step", ["tempfile.NamedTemporaryFile", "os.fsync", "os.replace"])
def test_a_full_disk_is_named_and_nothing_stays_behind(step, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(step, full)
        assert main(["init", "new/folder/test_z.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("could not write new/folder/test_z.py: No space left on device\n")
    assert list(tmp_path.iterdir()) == []
    assert main(["init", "new/folder/test_z.py"]) == 0


def test_a_link_that_leads_nowhere_is_not_replaced(tmp_path, capsys):
    (tmp_path / "test_fp8.py").symlink_to("gone.py")
    assert main(["init"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "test_fp8.py").is_symlink()


def test_commands_that_are_shown_are_quoted_for_a_shell(tmp_path, capsys):
    named = "a b/größe/test_my model.py"
    assert main(["init", named]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  pytest"))
    assert shlex.split(command) == ["pytest", named]
    for again, meant in (
        (named, "a b/größe/test_fp8_first.py"),
        ("a b", "a b/test_fp8.py"),
        ("a b/x.py", "a b/test_fp8.py"),
    ):
        assert main(["init", again]) == 2
        offered = capsys.readouterr().err.splitlines()[-1].split("next:")[1]
        assert shlex.split(offered) == ["pytest-fp8", "init", meant]


def test_a_name_that_the_output_cannot_encode_is_escaped(tmp_path):
    command = [sys.executable, "-m", "pytest_fp8.cli", "init", "größe/test_z.py"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"wrote gr\\xf6\\xdfe/test_z.py.")
    assert (tmp_path / "größe/test_z.py").is_file()
