"""The suite's groups: what ``-m`` chooses, so that each command stays within its minutes."""

from __future__ import annotations

import json
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
        assert (matrix.group_of(case) in matrix.GROUPS) != (case.emulated and case.gpus == 1), case.id


def test_the_core_is_both_libraries_at_three_sizes_and_the_null():
    core = [case.id for case in [*matrix.ALL, *matrix.OWN, matrix.NULL] if matrix.group_of(case) == "core"]
    assert len(core) == 19
    assert len(set(core)) == 19


COLLECT = """
import json, sys
import pytest

class Seen:
    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]

found = []
for chosen in json.loads(sys.argv[1]):
    seen = Seen()
    assert pytest.main(["suites", "--collect-only", "-qq", "-p", "no:cacheprovider", *chosen], plugins=[seen]) == 0
    found.append(seen.tests)
print(json.dumps(found))
"""


def collected(*commands):
    """The tests that each of these options of ``pytest suites`` choose."""
    asked = [sys.executable, "-c", COLLECT, json.dumps(commands)]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return [set(tests) for tests in json.loads(done.stdout.splitlines()[-1])]


def cases_in(tests):
    return {test.rpartition("[")[2].rstrip("]") for test in tests if "[" in test}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_of_the_ci_page_ask_every_case_once():
    rows = re.findall(r"^\| .* \| .* \| `(-.*)` \|$", (ROOT / "docs/ci.md").read_text(), re.MULTILINE)
    assert len(rows) >= 2 * len(matrix.GROUPS)
    whole, *asked = collected([], *map(shlex.split, rows))
    # Where a GPU is declared the emulated cases skip.
    assert {test for test in whole - set().union(*asked) if "emulated" not in test} == set()
    assert sum(map(len, asked)) == len(set().union(*asked)), "a test is asked by two commands"
