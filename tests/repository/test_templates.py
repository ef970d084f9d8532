"""The templates of docs/templates/: what they run is accepted by the commands of today, and they ask for no right that
they do not need."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from string import Template

import pytest

from pytest_fp8.cli import parser
from pytest_fp8.options import read_settings

yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "docs/templates"
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".yml", ".sh"))
WORKFLOWS = [path for path in FILES if path.suffix == ".yml" and ".gitlab" not in path.name]
GIVEN = {"RUNNER_TEMP": "temp", "REASON": "torch 2.13", "CI_MERGE_REQUEST_DIFF_BASE_SHA": "HEAD^1"}
GIVEN |= {"base": "HEAD^1", "SLURM_JOB_ID": "7"}
STORED = re.compile(r"\$\{stored:\+(\S+)\}")
"""What a gate is given once its base has baselines."""
TEST = """
import pytest
from pytest_fp8 import Case

@pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
def test_fp8(fp8_pair):
    fp8_pair.assert_layers()
"""
ENDS = (">", "||", "&&", ";", "|")
DAYS = pytest.mark.parametrize("stored", [False, True], ids=["first-day", "baselines-stored"])


def scripts(path):
    """The shell code of a template, one text for each step."""
    if path.suffix != ".yml":
        return [path.read_text()]
    read = yaml.safe_load(path.read_text())
    if "jobs" in read:
        return [step["run"] for job in read["jobs"].values() for step in job["steps"] if "run" in step]
    jobs = [job for job in read.values() if isinstance(job, dict)]
    return [line for job in jobs for key in ("before_script", "script") for line in job.get(key, [])]


def commands(path, tool, stored=True):
    """The arguments of each call of ``tool`` in a template, as the shell would give them."""
    for line in "\n".join(scripts(path)).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(STORED.sub(r"\1" if stored else "", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = [Template(word).safe_substitute(GIVEN) for word in lexer]
        if tool in words:
            arguments = words[words.index(tool) + 1 :]
            end = next((index for index, word in enumerate(arguments) if word in ENDS), len(arguments))
            # `pip install pytest-fp8` is no call of it.
            if words[0] != "pip":
                yield arguments[:end]


def every_command(tool, stored=True):
    found = [(path, arguments) for path in FILES for arguments in commands(path, tool, stored)]
    once = {" ".join(arguments): (path.name, arguments) for path, arguments in found}
    return [pytest.param(arguments, id=f"{name}-{index}") for index, (name, arguments) in enumerate(once.values())]


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """Whether baselines are stored -> a git repository of two commits, with a test and what is stored in the first."""
    made = {}
    for stored in (False, True):
        folder = tmp_path_factory.mktemp("project")
        (folder / "tests").mkdir()
        (folder / "tests/test_fp8.py").write_text(TEST)
        if stored:
            shutil.copytree(FOLDER.parents[1] / "baselines/h100", folder / "baselines/h100")
        git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "init", "-q"], check=True)
        for message in ("base", "head"):
            subprocess.run([*git, "add", "-A"], check=True)
            subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], check=True)
        subprocess.run([*git, "update-ref", "refs/remotes/origin/main", "HEAD^"], check=True)
        made[stored] = folder
    return made


@pytest.mark.parametrize("arguments", every_command("pytest", stored=False))
def test_pytest_accepts_the_options_on_the_first_day(arguments, pytester):
    read_settings(pytester.parseconfig(*arguments))


GATES = [
    pytest.param(script, id=path.name)
    for path in FILES
    for script in (["\n".join(scripts(path))] if ".gitlab" in path.name else scripts(path))
    if "--fp8-base=" in script or "stored=" in script
]


@DAYS
@pytest.mark.parametrize("script", GATES)
def test_a_gate_reads_baselines_of_its_base_where_there_are_some(script, stored, projects, tmp_path):
    """The shell code itself is run, with tools that say how they were called."""
    for tool in ("pytest", "pytest-fp8", "srun", "pip", "python3", "source"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@"\n')
        (tmp_path / tool).chmod(0o755)
    env = {**os.environ, **GIVEN, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = re.sub(r"^source .*$", "", script, flags=re.MULTILINE)
    command = ["bash", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=projects[stored], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "pytest tests/test_fp8.py" in script:
        assert "--fp8-base=" in done.stdout
    if "baselines diff" in script:
        assert ("pytest-fp8 baselines diff --git" in done.stdout) == stored


@pytest.mark.parametrize("arguments", every_command("pytest-fp8"))
def test_the_command_line_accepts_the_arguments(arguments):
    parser().parse_args(arguments)


def test_every_run_leaves_a_report_and_fails_without_an_answer():
    """No file is uploaded from a folder whose name begins with a dot."""
    for path in FILES:
        for arguments in commands(path, "pytest"):
            # Without a declared GPU no session fails for want of an answer: the test must.
            assert any(word.startswith("--fp8-gpu=") for word in arguments) or "--fp8-strict" in arguments
            assert any(word.startswith("--fp8-report=fp8-report") for word in arguments)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_of_github_asks_for_no_right_that_it_does_not_need(path):
    """No job may write but the one that opens a pull request; actions are pinned, no token stays on disk, and nothing
    that others write becomes shell code: an expression in a script is replaced before the shell reads it, environment
    variables are not."""
    read = yaml.safe_load(path.read_text())
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        assert ("permissions" in job) == (name == "propose")
        assert "self-hosted" not in job["runs-on"] or "permissions" not in job
        assert job["timeout-minutes"] <= 240
        for step in job["steps"]:
            uses = step.get("uses", "")
            assert not uses or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", uses)
            if uses.startswith("actions/checkout@"):
                # The job that pushes a branch needs it.
                assert name == "propose" or step["with"]["persist-credentials"] is False
            if uses.startswith("actions/upload-artifact@"):
                assert step["if"] == "always()"
    assert not [script for script in scripts(path) if "${{" in script]
    assert not re.search(r"pull_request_target|secrets\.", path.read_text())


def test_all_that_is_installed_is_pinned():
    """But for the user's own project."""
    for path in FILES:
        lines = [line.partition(" #")[0].strip() for line in "\n".join(scripts(path)).splitlines()]
        installs = [line for line in lines if "pip install" in line or '/pip" install' in line]
        assert all(line.endswith(("-r requirements-fp8.txt", "install -e .")) for line in installs), installs
    lines = (FOLDER / "requirements-fp8.txt").read_text().splitlines()
    for line in lines:
        assert re.fullmatch(r"#.*|\./wheels/pytest_fp8-[\d.]+-py3-none-any\.whl(\[\w+\])?|[\w-]+==[\d.]+", line), line
