"""``pytest-fp8 suites`` in another folder: the tests of the clone, whatever pytest is configured to do there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; from pytest_fp8.cli import main; sys.exit(main())"
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What a wheel installs: the package, and what pyproject.toml has the wheel carry with it."""
    site = tmp_path_factory.mktemp("installed") / "site-packages"
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    carried = {**{package: package for package in wheel["packages"]}, **wheel["force-include"]}
    for source, target in carried.items():
        shutil.copytree(ROOT / source, site / target, ignore=shutil.ignore_patterns("__pycache__"))
    return site


@pytest.fixture
def project(tmp_path):
    """A folder whose own configuration of pytest would break the suites."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = spec_*.py\n")
    (folder / "conftest.py").write_text("raise RuntimeError('the conftest of another project')\n")
    return folder


def ran(site, folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", COMMAND, "suites", *QUIET, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


def ids(text):
    return [line for line in text.splitlines() if "::" in line]


def test_the_tests_are_those_of_the_clone_by_their_names(installed, project):
    clone = [sys.executable, "-m", "pytest", "suites", *QUIET, "--collect-only"]
    there = subprocess.run(clone, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    code, here = ran(installed, project, "--collect-only")
    assert code == 0, here
    assert len(ids(here)) > 400
    assert ids(here) == ids(there)


def test_the_exit_status_is_that_of_pytest(installed, project):
    code, said = ran(installed, project, "--fp8-gpu=b200", "-k", "test_layers and tiny")
    assert code == 1, said
    assert "A gate that ran nothing is not green" in said


def test_without_the_plugin_the_suites_skip_and_say_so():
    command = [sys.executable, "-m", "pytest", "suites", *QUIET, "-p", "no:fp8", "-rs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "the suites ask through pytest-fp8, which -p no:fp8 leaves out" in done.stdout
    assert "passed" not in done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_reports_stay_in_the_folder_and_a_case_is_the_one_of_the_clone(installed, project):
    """A model that a test file defines: its hash is of its source, wherever the file is."""
    pytest.importorskip("torchao")
    before = sorted(installed.rglob("*"))
    asked = ("-k", "test_the_router_stays and emulated")
    code, said = ran(installed, project, *asked, "--fp8-report=out")
    assert code == 0, said
    assert sorted(installed.rglob("*")) == before
    clone = [sys.executable, "-m", "pytest", "suites", *QUIET, *asked, f"--fp8-report={project / 'clone'}"]
    subprocess.run(clone, cwd=ROOT, capture_output=True, timeout=300, check=True)
    entries = [json.loads((project / folder / "report.json").read_text())["entries"] for folder in ("out", "clone")]
    assert entries[0] == entries[1]
