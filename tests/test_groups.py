"""The suite's groups: what ``-m`` chooses, so that each command stays within its minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import matrix

ROOT = Path(__file__).parent.parent


def test_each_case_on_a_gpu_is_in_one_known_group():
    for case in [*matrix.ALL, *matrix.OWN, matrix.NULL]:
        assert (matrix.group_of(case) in matrix.GROUPS) != case.emulated, case.id


def test_the_core_is_both_libraries_at_three_sizes_and_the_null():
    core = [case.id for case in [*matrix.ALL, *matrix.OWN, matrix.NULL] if matrix.group_of(case) == "core"]
    assert len(core) == 19
    assert len(set(core)) == 19


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["-m", "core", "-k", "8b"], {"8b-te-delayed", "8b-torchao-rowwise"}),
        (["-m", "lora", "-k", "8b"], {"8b-te-current-lora16"}),
        (["-m", "own"], {"own.loop-te-delayed", "own.vit-te-current", "own.moe-torchao-tensorwise-eager"}),
    ],
)
def test_a_group_is_chosen_by_its_mark(chosen, expected):
    command = [sys.executable, "-m", "pytest", "suites", "--collect-only", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    cases = {line.rpartition("[")[2].rstrip("]") for line in done.stdout.splitlines() if "[" in line}
    assert expected <= cases
    for case in [*matrix.ALL, *matrix.OWN]:
        assert (case.id in cases) == _belongs(case, chosen), case.id


def _belongs(case, chosen):
    return matrix.group_of(case) == chosen[1] and ("-k" not in chosen or chosen[-1] in case.id)
