"""Where Python keeps no bytecode of the libraries, the arms of a session compile them once."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import subprocess
import sys

import pytest

from pytest_fp8.arms import env as arm_environment
from pytest_fp8.arms.env import arm_env, compiled_code_in
from pytest_fp8.arms.scratch import session_folder
from pytest_fp8.bytecode import FOLDER, kept_by_children

VARIABLES = (FOLDER, "PYTHONPYCACHEPREFIX")


@pytest.fixture
def torch_in(tmp_path, monkeypatch):
    """A torch without bytecode, which Python may write. The function gives the variables of an arm."""
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    found = importlib.util.spec_from_file_location("torch", source)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: found if name == "torch" else real(name, *more)
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    arm_environment._compiles_anew.cache_clear()
    yield source
    arm_environment._compiles_anew.cache_clear()


def told(tmp_path):
    env = arm_env("torchao", tmp_path)
    return [env.get(name) for name in VARIABLES]


def test_where_python_may_write_it_nothing_is_changed(torch_in, tmp_path):
    assert told(tmp_path) == [None, None]


def test_where_python_must_not_write_it_goes_to_the_sessions_folder(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert told(tmp_path) == [str(session_folder() / "bytecode"), None]


def test_where_the_installation_cannot_be_written_it_goes_there_too(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert told(tmp_path)[0] == str(session_folder() / "bytecode")


def test_where_it_is_there_already_it_is_read(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept = importlib.util.cache_from_source(str(torch_in))
    os.makedirs(os.path.dirname(kept))
    open(kept, "w").close()
    assert told(tmp_path) == [None, None]


def test_a_users_own_folder_for_it_stays(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/mine")
    assert told(tmp_path) == [None, "/mine"]


def test_a_folder_that_keeps_compiled_code_keeps_this_too(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with compiled_code_in(tmp_path / "kept"):
        assert told(tmp_path) == [str(tmp_path / "kept" / "bytecode"), None]
    assert [os.environ.get(name) for name in VARIABLES] == [None, None]


IMPORTS = """
import sys
from pytest_fp8.bytecode import keep_bytecode
keep_bytecode()
import compiled, library
print(compiled.__cached__, library.VALUE, sys.dont_write_bytecode)
"""


@pytest.fixture
def library(torch_in, tmp_path, monkeypatch):
    """Two modules, one of which has its bytecode beside it. The function imports them as an arm does."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    source = tmp_path / "library.py"
    source.write_text("VALUE = 1\n")
    (tmp_path / "compiled.py").write_text("")
    py_compile.compile(str(tmp_path / "compiled.py"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def imported():
        env = arm_env("torchao", tmp_path)
        done = subprocess.run([sys.executable, "-c", IMPORTS], env=env, check=True, capture_output=True, text=True)
        return source, done.stdout.split()

    return imported


def kept():
    return {path.name.partition(".")[0]: path for path in (session_folder() / "bytecode").rglob("*.pyc")}


def test_an_arm_writes_bytecode_there_and_nowhere_else(library, tmp_path):
    library()
    assert "library" in kept()
    assert "compiled" not in kept(), "it is read beside the source"
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("__pycache__/*.pyc")] == ["compiled"]


def test_what_was_kept_is_read_until_its_source_changes(library, tmp_path):
    source, said = library()
    assert said[1:] == ["1", "True"]
    # Another value in the bytecode shows that it is read; it stands for the source's size and time.
    py_compile.compile(str(source), str(kept()["library"]))
    content = kept()["library"].read_bytes()
    other = tmp_path / "other.py"
    other.write_text("VALUE = 7\n")
    py_compile.compile(str(other), str(tmp_path / "other.pyc"))
    kept()["library"].write_bytes(content[:16] + (tmp_path / "other.pyc").read_bytes()[16:])
    assert library()[1][1] == "7"
    source.write_text("VALUE = 22\n")
    assert library()[1][1] == "22"


@pytest.mark.parametrize("set_before", [True, False], ids=["forbidden", "not writable"])
def test_what_an_arm_kept_its_children_read_and_write_what_they_miss(library, tmp_path, monkeypatch, set_before):
    library()
    (tmp_path / "further.py").write_text("")
    written = next((session_folder() / "bytecode" / str(tmp_path).lstrip("/")).glob("library.*.pyc"))
    stamp = written.stat().st_mtime_ns
    monkeypatch.setenv(FOLDER, str(session_folder() / "bytecode"))
    if not set_before:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    before = dict(os.environ)
    with kept_by_children():
        child = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import library, further; print(library.__cached__)"
        done = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True)
    assert dict(os.environ) == before
    assert done.stdout.strip() == str(written)
    assert written.stat().st_mtime_ns == stamp
    assert "further" in kept()
    assert not list(tmp_path.rglob("__pycache__/further*"))


def test_where_python_keeps_bytecode_itself_children_do_so_as_well(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    before = dict(os.environ)
    with kept_by_children():
        assert dict(os.environ) == before
