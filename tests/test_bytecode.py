"""Where Python keeps no bytecode of the libraries, the arms of a session compile them once."""

from __future__ import annotations

import importlib.util
import os

import pytest

from pytest_fp8.arms import env as arm_environment
from pytest_fp8.arms.env import arm_env
from pytest_fp8.arms.scratch import session_folder

VARIABLES = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")


@pytest.fixture
def torch_in(tmp_path, monkeypatch):
    """A torch without bytecode, in an image that forbids to write it."""
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    found = importlib.util.spec_from_file_location("torch", source)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: found if name == "torch" else real(name, *more)
    )
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    arm_environment._without_bytecode.cache_clear()
    yield source
    arm_environment._without_bytecode.cache_clear()


def told(tmp_path):
    env = arm_env("torchao", tmp_path)
    return [env.get(name) for name in VARIABLES]


def test_where_it_may_not_be_written_arms_write_it_all_the_same(torch_in, tmp_path):
    assert told(tmp_path) == ["", None]


def test_where_the_installation_cannot_be_written_it_goes_to_the_sessions_folder(torch_in, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert told(tmp_path) == ["", str(session_folder() / "bytecode")]


def test_where_it_is_there_already_it_is_read(torch_in, tmp_path):
    kept = importlib.util.cache_from_source(str(torch_in))
    os.makedirs(os.path.dirname(kept))
    open(kept, "w").close()
    assert told(tmp_path) == ["1", None]


def test_a_users_own_folder_for_it_stays(torch_in, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/mine")
    assert told(tmp_path) == ["1", "/mine"]
