"""The suite's groups: what ``-m`` chooses, so that each command stays within its minutes."""

from __future__ import annotations

import re
import shlex
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


def collected(chosen):
    command = [sys.executable, "-m", "pytest", "suites", "--collect-only", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def cases_in(tests):
    return {test.rpartition("[")[2].rstrip("]") for test in tests if "[" in test}


@pytest.mark.parametrize("group", matrix.GROUPS)
def test_a_group_is_chosen_by_its_mark(group):
    cases = cases_in(collected(["-m", group]))
    for case in [*matrix.ALL, *matrix.OWN]:
        assert (case.id in cases) == (matrix.group_of(case) == group), case.id


def test_the_commands_of_the_readme_ask_every_case_once():
    rows = re.findall(r"^\| .* \| .* \| (`-.*`) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    commands = [shlex.split(command) for row in rows for command in re.findall("`([^`]*)`", row)]
    asked = [collected(command) for command in commands]
    assert len(asked) > 2 * len(matrix.GROUPS) - 3
    # Where a GPU is declared the emulated cases skip.
    assert {test for test in collected([]) - set().union(*asked) if "emulated" not in test} == set()
    assert sum(map(len, asked)) == len(set().union(*asked)), "a test is asked by two commands"
