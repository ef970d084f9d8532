"""Errors of baselines' files and commands: each code, from a file or command that leads to it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.baselines import GOOD, baseline, edit, read
from pytest_fp8 import Case
from pytest_fp8.baselines.check import inspect, suite_cases
from pytest_fp8.baselines.store import Folder, chosen, read_folder, write_baseline
from pytest_fp8.codes import B
from pytest_fp8.errors import Fp8Error

FILE = "h200/1b-torchao-rowwise.json"


def written(change):
    """Reads the sound baseline after ``change`` of its path."""

    def ask(folder):
        write_baseline(folder, GOOD)
        change(folder / FILE)
        read(folder)

    return ask


def onto_a_file(folder):
    (folder / "h200").write_text("")
    write_baseline(folder, GOOD)


def of_no_revision(folder):
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    Folder(folder, "nowhere").all()


RAISED = {
    B.UNREADABLE: written(lambda path: path.write_text("{")),
    B.REDEFINED: written(lambda path: edit(path, lambda data: data.update(case_hash="b"))),
    B.NOT_WRITTEN: onto_a_file,
    B.NOTHING_THERE: lambda folder: read_folder(folder / "basline"),
    B.UNKNOWN_NAME: lambda folder: chosen({Path(FILE): GOOD}, case="1b-torchao-rowwse"),
    B.NO_REVISION: of_no_revision,
    B.NO_SUITE: lambda folder: suite_cases(folder / "matrix.py"),
}
"""Code -> what raises it in a folder."""


@pytest.mark.parametrize("code", RAISED, ids=lambda code: code.slug)
def test_words(code, snapshot, tmp_path):
    with pytest.raises(Fp8Error) as error:
        RAISED[code](tmp_path)
    assert error.value.code is code
    assert str(error.value).replace(str(tmp_path), "FOLDER").replace(os.getcwd(), "HERE") == snapshot


def found_in_a_folder():
    """What ``check`` says of a folder that has one of each."""
    case, other = Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")
    speeds = {"speedup": [[0.0] * 6, [0.2] * 6], "fp8_share": [0.5]}
    coarse = baseline(case.id, case.digest(), metrics=speeds)
    stored = {
        case.id: replace(coarse, sessions=(replace(coarse.newest, measurement=1),)),
        "1b-nobody": baseline("1b-nobody", "h"),
    }
    files = {Path("h200", f"{name}.json"): each for name, each in stored.items()}
    return inspect(files, [case, other])


def test_words_of_check(snapshot):
    found = found_in_a_folder()
    assert sorted({note.code for note in found}) == sorted(set(B) - set(RAISED))
    assert "\n".join(f"{note.code} {note.error}: {note.message}" for note in found) == snapshot
