"""Baselines of another GPU, case, definition or run: they are never compared with, and say how to measure again."""

import os
from dataclasses import replace

import pytest

from helpers.good_baseline import GOOD, read
from pytest_fp8.baselines.store import baseline_path, read_baseline, write_baseline
from pytest_fp8.errors import BaselineError


@pytest.fixture
def stored(tmp_path):
    write_baseline(tmp_path, GOOD)
    return tmp_path


def test_a_baseline_of_another_gpu_is_never_compared_with(stored):
    (stored / "h100").mkdir()
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h100", GOOD.case))
    with pytest.raises(BaselineError, match="another GPU") as error:
        read(stored, gpu="h100")
    assert f"pytest-fp8 suites -k {GOOD.case} --fp8-gpu=h100 --fp8-update" in error.value.next_step


def test_a_case_of_ones_own_is_measured_by_pytest(tmp_path):
    own = replace(GOOD, case="own-torchao-tensorwise")
    write_baseline(tmp_path, own)
    (tmp_path / "h100").mkdir()
    os.rename(baseline_path(tmp_path, "h200", own.case), baseline_path(tmp_path, "h100", own.case))
    with pytest.raises(BaselineError) as error:
        read_baseline(tmp_path, "h100", own.case, own.case_hash)
    assert f": pytest -k {own.case} --fp8-gpu=h100 --fp8-update" in error.value.next_step


def test_a_renamed_baseline_is_never_compared_with(stored):
    os.rename(baseline_path(stored, "h200", GOOD.case), baseline_path(stored, "h200", "8b-te-block"))
    with pytest.raises(BaselineError, match="another case"):
        read(stored, case="8b-te-block")


def test_a_case_that_was_redefined_is_never_compared_with(stored):
    with pytest.raises(BaselineError, match="another definition of case") as error:
        read(stored, case_hash="def")
    assert "pytest-fp8 suites -k 1b-torchao-rowwise --fp8-gpu=h200" in str(error.value)


def test_an_own_model_s_hash_that_never_stays_is_explained(tmp_path):
    write_baseline(tmp_path, replace(GOOD, case="own.net-torchao-rowwise"))
    with pytest.raises(BaselineError, match="each run has another hash") as error:
        read(tmp_path, case="own.net-torchao-rowwise", case_hash="def")
    assert "pytest -k own.net-torchao-rowwise --fp8-gpu=h200" in str(error.value)


def test_an_emulated_case_is_measured_again_without_a_declared_gpu(tmp_path):
    write_baseline(tmp_path, replace(GOOD, gpu="emulated"))
    with pytest.raises(BaselineError) as error:
        read_baseline(tmp_path, "emulated", GOOD.case, "def")
    assert "--fp8-gpu" not in str(error.value)
    assert f"-k {GOOD.case} --fp8-update" in str(error.value)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", ".hidden", "x\n"])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(BaselineError, match="cannot name a baseline"):
        baseline_path(tmp_path, "h200", name)
