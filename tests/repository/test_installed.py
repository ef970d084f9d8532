"""What a user has: the examples, which README and docs show as they are, and from the wheel, in a folder that knows no
checkout, the package with its suites."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest

from benchmarks.shown import BLOCK, ROOT, RUNS, filled, pages, shape

EXAMPLES = sorted((ROOT / "examples").glob("**/*.py"))
SUITES = ("-c", "import sys; from pytest_fp8.cli import main; sys.exit(main())", "suites")
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


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
def test_the_readme_s_example_passes(pytester):
    pytester.makepyfile((ROOT / "examples/test_model.py").read_text())
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)


# -- from the wheel ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, its entry point included, as ``pip install --target`` leaves it."""
    pytest.importorskip("hatchling.build")
    folder, built = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(built)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def project(tmp_path):
    """A folder whose own configuration of pytest would break the suites."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = spec_*.py\n")
    (folder / "conftest.py").write_text("raise RuntimeError('the conftest of another project')\n")
    return folder


def python(folder, site, *arguments):
    """(the exit code, what is printed) of Python in a folder, with the package from ``site``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    env |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=3600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def in_the_clone(*arguments):
    return python(ROOT, ROOT, "-m", "pytest", "suites", *QUIET, *arguments)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_examples_pass_outside_of_the_clone(tmp_path, installed):
    """Those for a GPU are collected, and skipped without one."""
    for path in EXAMPLES:
        target = tmp_path / path.relative_to(ROOT / "examples")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    asked = ("-p", "no:cacheprovider", "--fp8-strict", "--junitxml=ended.xml", ".")
    code, said = python(tmp_path, installed, "-m", "pytest", *asked)
    assert code == 0, said
    cases = ElementTree.parse(tmp_path / "ended.xml").iter("testcase")
    skipped = {(case.get("classname"), case.get("name").partition("[")[0]): case.find("skipped") for case in cases}
    for path in EXAMPLES:
        code = path.read_text()
        module = ".".join(path.relative_to(ROOT / "examples").with_suffix("").parts)
        for test in re.findall(r"^def (test_\w+)", code, flags=re.MULTILINE):
            mark = code.partition(f"def {test}(")[0].rpartition("pytest.mark.fp8(")[2]
            needs = re.search(r'skipif\(find_spec\("(\w+)"\) is None', code)
            runs = "emulated=True" in mark and (needs is None or find_spec(needs[1]) is not None)
            assert (skipped[module, test] is None) == runs, said


@pytest.mark.slow
def test_the_suites_are_those_of_the_clone_by_the_names_of_their_tests(installed, project):
    (code, here), (_, there) = python(project, installed, *SUITES, *QUIET, "--collect-only"), in_the_clone("--co")
    assert code == 0, here
    ids = [line for line in here.splitlines() if "::" in line]
    assert len(ids) > 400
    assert ids == [line for line in there.splitlines() if "::" in line]


@pytest.mark.slow
def test_the_exit_status_of_the_suites_is_that_of_pytest(installed, project):
    code, said = python(project, installed, *SUITES, *QUIET, "--fp8-gpu=b200", "-k", "test_layers and tiny")
    assert code == 1, said
    assert "A gate that ran nothing is not green" in said


@pytest.mark.slow
def test_without_the_plugin_the_suites_skip_and_say_so():
    code, said = in_the_clone("-p", "no:fp8", "-rs")
    assert code == 0, said
    assert "the suites ask through pytest-fp8, which -p no:fp8 leaves out" in said
    assert "passed" not in said


@pytest.mark.nightly
@pytest.mark.slow
def test_reports_of_the_suites_stay_in_the_folder_and_a_case_is_the_one_of_the_clone(installed, project):
    """A model that a test file defines: its hash is of its source, wherever the file is."""
    pytest.importorskip("torchao")
    before = sorted(installed.rglob("*"))
    asked = ("-k", "test_the_router_stays and emulated")
    code, said = python(project, installed, *SUITES, *QUIET, *asked, "--fp8-report=out")
    assert code == 0, said
    assert sorted(installed.rglob("*")) == before
    in_the_clone(*asked, f"--fp8-report={project / 'clone'}")
    entries = [json.loads((project / folder / "report.json").read_text())["entries"] for folder in ("out", "clone")]
    assert entries[0] == entries[1]
