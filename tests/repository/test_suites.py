"""The suite's groups, of which each command chooses one by ``-m``; and on fake arms, that a case which a GPU cannot
hold is skipped with the bytes that are missing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import matrix
from helpers.fakes import H100, H200, install

ROOT = Path(__file__).parents[2]
CASES = [*matrix.ALL, *matrix.OWN, matrix.NULL]


def test_each_case_on_a_gpu_is_in_one_known_group():
    for case in CASES:
        assert (matrix.group_of(case) in matrix.GROUPS) != (case.emulated and case.gpus == 1), case.id
    core = {case.id for case in CASES if matrix.group_of(case) == "core"}
    assert core == {case.id for case in (*matrix.TINY, *matrix.ONE_B)}


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


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_of_the_ci_page_ask_every_case_once():
    rows = re.findall(r"^\| .* \| .* \| `(-.*)` \|$", (ROOT / "docs/ci.md").read_text(), re.MULTILINE)
    assert len(rows) >= len(matrix.GROUPS)
    command = [sys.executable, "-c", COLLECT, json.dumps([[], *map(shlex.split, rows)])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    whole, *asked = map(set, json.loads(done.stdout.splitlines()[-1]))
    # Where a GPU is declared the emulated cases skip.
    assert {test for test in whole - set().union(*asked) if "emulated" not in test} == set()
    assert sum(map(len, asked)) == len(set().union(*asked)), "a test is asked by two commands"


@pytest.mark.parametrize(("gpu", "holds"), [(H100, False), (H200, True)], ids=["h100", "h200"])
def test_an_arm_that_the_gpu_cannot_hold_is_skipped_with_what_is_missing(pytester, monkeypatch, gpu, holds):
    """The layers of 8B, asked in a process of its own folder."""
    world = install(monkeypatch, gpu)
    tests = [
        f"{ROOT}/suites/test_questions.py::test_layers[{case}]" for case in ("8b-te-delayed", "8b-torchao-tensorwise")
    ]
    # Neither the report that the repository's ini file names, nor its baselines: fake arms have two layers.
    options = (f"--fp8-gpu={gpu.key}", "-rs", "--fp8-report=", "--fp8-baselines=none")
    result = pytester.runpytest("-p", "no:cacheprovider", *tests, *options)
    assert result.parseoutcomes().get("skipped", 0) == (not holds)
    assert ("8b-te-delayed" in world.built) is holds
    assert {"8b-bf16", "8b-torchao-tensorwise"} <= set(world.built)
    if not holds:
        result.stdout.fnmatch_lines(["*SKIPPED*8b-te-delayed takes 80 to 83 GiB at its peak, and this GPU has 79*"])
