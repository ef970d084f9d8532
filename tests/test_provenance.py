"""Provenance says enough to judge a number, and nothing about whose machine it was."""

import getpass
import json
import socket
from pathlib import Path

from pytest_fp8.baselines.provenance import provenance


def test_without_a_history_the_commit_may_be_named_and_dirty_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_FP8_COMMIT", "0123456789ab")
    said = provenance(tmp_path, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"], said["reason"]) == ("0123456789ab", None, "why")


def test_no_host_no_user_no_path(tmp_path):
    text = json.dumps(provenance(tmp_path, {"name": "NVIDIA H200"}, "why"))
    for private in (socket.gethostname(), str(tmp_path), f'"{getpass.getuser()}"'):
        assert private not in text


def test_the_commit_that_is_named_beats_a_history_the_tree_was_laid_upon(monkeypatch):
    here = Path(__file__).parents[1]
    monkeypatch.setenv("PYTEST_FP8_COMMIT", "0123456789ab")
    said = provenance(here, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"]) == ("0123456789ab", None)
