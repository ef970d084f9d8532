"""The examples: each stands alone, and what README and docs show of them is what they are and print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest

from benchmarks.shown import BLOCK, ROOT, RUNS, filled, pages, shape

EXAMPLES = sorted((ROOT / "examples").glob("**/*.py"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_shows_the_files_as_they_are(page):
    assert filled(page.read_text(), run=False) == page.read_text(), "python -m benchmarks.shown"


def test_every_output_shown_is_made_by_a_run():
    shown = [
        found["name"] for page in pages() for found in BLOCK.finditer(page.read_text()) if found["kind"] == "output"
    ]
    assert set(shown) == set(RUNS)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_output_shown_has_the_shape_that_is_printed(name):
    printed = shape(RUNS[name]())
    for page in pages():
        for found in BLOCK.finditer(page.read_text()):
            if found["name"] == name:
                assert shape(found["body"]) == printed, "python -m benchmarks.shown --run"


@pytest.mark.slow
def test_the_example_of_a_loop_passes(pytester):
    pytester.makepyfile(test_loop=(ROOT / "examples/test_loop.py").read_text())
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1, skipped=2)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_examples_pass_outside_of_the_clone(tmp_path):
    """Those for a GPU are collected, and skipped without one."""
    for path in EXAMPLES:
        target = tmp_path / path.relative_to(ROOT / "examples")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--fp8-strict", "--junitxml=ended.xml", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    cases = ElementTree.parse(tmp_path / "ended.xml").iter("testcase")
    skipped = {(case.get("classname"), case.get("name").partition("[")[0]): case.find("skipped") for case in cases}
    for path in EXAMPLES:
        code = path.read_text()
        module = ".".join(path.relative_to(ROOT / "examples").with_suffix("").parts)
        for test in re.findall(r"^def (test_\w+)", code, flags=re.MULTILINE):
            mark = code.partition(f"def {test}(")[0].rpartition("pytest.mark.fp8(")[2]
            needs = re.search(r'skipif\(find_spec\("(\w+)"\) is None', code)
            runs = "emulated=True" in mark and (needs is None or find_spec(needs[1]) is not None)
            assert (skipped[module, test] is None) == runs, done.stdout
