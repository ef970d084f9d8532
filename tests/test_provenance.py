"""Provenance says enough to judge a number, and nothing about whose machine it was."""

import getpass
import json
import socket

import pytest

from pytest_fp8.baselines.provenance import provenance
from pytest_fp8.git import git


def test_without_a_history_the_commit_may_be_named_and_dirty_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    said = provenance(tmp_path, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"], said["reason"]) == ("0123456789ab", None, "why")


def test_no_host_no_user_no_path(tmp_path):
    text = json.dumps(provenance(tmp_path, {"name": "NVIDIA H200"}, "why"))
    for private in (socket.gethostname(), str(tmp_path), f'"{getpass.getuser()}"'):
        assert private not in text


def test_a_history_goes_before_what_a_job_names(monkeypatch, repository):
    (repository / "train.py").write_text("1")
    commit(repository)
    monkeypatch.setenv("GITHUB_SHA", "0123456789ab")
    said = provenance(repository, {"name": "NVIDIA H200"}, "why")
    assert (said["commit"], said["dirty"]) == (git(repository, "rev-parse", "--short=12", "HEAD").strip(), False)


@pytest.mark.parametrize("folder", [":!lines", "deep/er/baselines"])
def test_a_folder_of_baselines_may_have_any_name(repository, folder):
    (repository / folder).mkdir(parents=True)
    stored, code = repository / folder / "case.json", repository / "train.py"
    for path in (stored, code):
        path.write_text("1")
    commit(repository)
    stored.write_text("2")
    assert (dirty(repository, repository / folder), dirty(repository, None)) == (False, True)
    code.write_text("2")
    assert dirty(repository, repository / folder)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    return tmp_path


def commit(folder):
    git(folder, "add", ".")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "all")


def dirty(root, stored):
    return provenance(root, {"name": "NVIDIA H200"}, "why", stored)["dirty"]
