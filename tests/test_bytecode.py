"""Where Python keeps no bytecode of the libraries, the arms of a session compile them once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from pytest_fp8.arms import env as arm_environment
from pytest_fp8.arms.env import arm_env, compiled_code_in
from pytest_fp8.arms.scratch import session_folder

VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


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
    assert told(tmp_path) == ["", str(session_folder() / "bytecode")]


def test_where_the_installation_cannot_be_written_it_goes_there_too(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert told(tmp_path)[1] == str(session_folder() / "bytecode")


def test_where_it_is_there_already_it_is_read(torch_in, tmp_path, monkeypatch):
    """With another folder Python would not look beside the source, and compile everything once."""
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
        assert told(tmp_path) == ["", str(tmp_path / "kept" / "bytecode")]
    assert [os.environ.get(name) for name in VARIABLES] == [None, None]


def test_an_arm_writes_bytecode_there_and_nowhere_else(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "library.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    subprocess.run([sys.executable, "-c", "import library"], env=arm_env("torchao", tmp_path), check=True)
    assert list((session_folder() / "bytecode").rglob("library.*.pyc"))
    assert not (tmp_path / "__pycache__").exists()
