"""Some of the catalogue of arms that misbehave; the whole of it is for `python -m benchmarks.faults catalogue`."""

from __future__ import annotations

import os

import pytest

from benchmarks.faults.catalogue import try_one
from benchmarks.faults.misbehaviours import CATALOGUE
from helpers.arms import spec
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.shipping import ship, unship

pytestmark = pytest.mark.slow

EACH_COMMIT = [
    "os._exit(0)",
    "closes every file descriptor",
    "an exception whose text raises",
    "a fork that stays, in a session of its own",
    "fills its temporary folder with folders of mode 000",
]
"""One a kind: an end, a channel, an exception, what it leaves running, what it leaves on the disk."""
NIGHTLY = [
    "KeyboardInterrupt",
    "an exception with escape sequences",
    "an exception with lone surrogates",
    "no more files (RLIMIT_NOFILE)",
    "raises where its output goes to a full disk",
    "a program that stays, in a session of its own",
    "deletes its temporary folder, then dies",
    "makes its socket non-blocking",
]
QUICK = [*EACH_COMMIT, *(pytest.param(what, marks=pytest.mark.nightly) for what in NIGHTLY)]
BY_WHAT = {wrong.what: wrong for wrong in CATALOGUE}


def test_the_catalogue_is_long_and_each_of_its_names_is_one():
    assert len({wrong.what for wrong in CATALOGUE}) == len(CATALOGUE) >= 50


@pytest.mark.parametrize("what", QUICK)
def test_a_misbehaviour_is_one_error_with_its_cause_and_leaves_nothing(what):
    assert try_one(BY_WHAT[what], fork=True).faults == []


@pytest.mark.nightly
def test_an_arm_that_becomes_another_program_has_closed_its_socket():
    assert try_one(BY_WHAT["becomes the program sleep"], fork=True).faults == []


def test_temporary_files_of_an_arm_lie_in_its_own_folder():
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())

        def where(model):
            import tempfile

            return tempfile.mkdtemp()

        made = unship(arm.request("call", function=ship(where, "a function")))
        assert made.startswith(f"{arm.folder}/")
    finally:
        arm.close()
    assert not os.path.exists(made)


@pytest.mark.nightly
def test_a_temporary_folder_with_a_very_long_name_works(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setattr("pytest_fp8.arms.scratch._made", [])
    arm = ArmProcess(fork=True)
    try:
        arm.build(spec())
        assert arm.folder.is_relative_to(deep)
        assert arm.request("layers")["converted"]
    finally:
        arm.close()
