"""Base and head of a comparison import their own code, wherever in the project it lies, and the repository stays as it
is."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pytest_fp8 import Case, Workload
from pytest_fp8.arms.environment import checkout, instrument
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.compare import environments
from pytest_fp8.errors import ArmError
from pytest_fp8.own_code import NOT_FROM, OtherSideError, own_code, require_own_code

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
MODEL = """
import sys
sys.path.insert(0, {late!r})
import torch
import late

def build():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

def batch(step):
    return torch.randn(16, 32)

def loss(model, x):
    return (model(x) - x).float().pow(2).mean()
"""


def git(project, *arguments):
    return subprocess.run([*GIT, *arguments], cwd=project, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with a module in each folder where people keep one: at the commit ``base``, and changed since."""
    top = tmp_path / "mein Projekt"
    folders = ("", "src", "tests", "lib", "deep/down")
    for folder in folders:
        (top / folder).mkdir(parents=True, exist_ok=True)
        (top / folder / f"in_{folder.replace('/', '_') or 'root'}.py").write_text("SIDE = 'base'\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "base")
    git(top, "tag", "base")
    for path in top.rglob("in_*.py"):
        path.write_text("SIDE = 'head'\n")
    for folder in ("new", "generated"):
        (top / folder).mkdir()
        (top / folder / f"in_{folder}.py").write_text("SIDE = 'head'\n")
    (top / ".gitignore").write_text("generated/\n")
    monkeypatch.chdir(top)
    # As pytest and its ini option pythonpath leave them.
    monkeypatch.setattr(
        "sys.path", [str(top / each) for each in ("tests", "lib", "deep/down", "new", "generated")] + sys.path
    )
    return top


IMPORTED = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        print(importlib.import_module(name).SIDE)
    except ModuleNotFoundError:
        print("nothing")
"""
EVERYWHERE = ("in_root", "in_src", "in_tests", "in_lib", "in_deep_down", "in_new")


def imported(side, folder, *modules):
    """What an arm of this side finds under these names: the constant of each, or nothing."""
    folder.mkdir()
    env = {**os.environ, **side.env(instrument(folder))}
    command = [sys.executable, "-c", IMPORTED, *modules]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def test_each_side_imports_its_own_code(project, tmp_path):
    with ExitStack() as held:
        base, head = environments("base", project, held)
        assert imported(base, tmp_path / "base", *EVERYWHERE) == ["base"] * 5 + ["nothing"]
        assert imported(head, tmp_path / "head", *EVERYWHERE) == ["head"] * 6


def test_head_has_the_tests_own_folder_too(project):
    with ExitStack() as held:
        _, head = environments("base", project, held)
    assert {str(project / "tests"), str(project / "generated")} <= {*head.import_path}
    assert not [path for path in head.import_path if "site-packages" in path]


def test_a_project_below_the_top_of_its_repository(project, tmp_path):
    """A monorepo: what lies beside the project is the commit's as well."""
    with ExitStack() as held:
        base, _ = environments("base", project / "deep", held)
        assert imported(base, tmp_path / "base", "in_lib") == ["base"]


def test_what_is_installed_inside_the_project_is_not_its_code(project, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(project / ".venv"))
    for path, own in {
        project / "lib": True,
        project: True,
        project / ".venv/lib/python3.11": False,
        project / "env/lib/python3.11/site-packages": False,
        Path(os.__file__): False,
        project.parent: False,
    }.items():
        assert own_code(path, project) is own, path


def test_code_of_the_project_as_it_is_here_is_none_of_another_commit(project, monkeypatch):
    (project / "committed.py").write_text("")
    git(project, "add", ".")
    monkeypatch.syspath_prepend(project)
    monkeypatch.setitem(sys.modules, "committed", importlib.import_module("committed"))
    require_own_code()
    monkeypatch.setenv(NOT_FROM, f"{project}{os.pathsep}{project / 'checkout'}")
    with pytest.raises(OtherSideError, match=r"committed came from .*which is not of this commit"):
        require_own_code()


@pytest.mark.nightly
@pytest.mark.slow
def test_an_arm_of_base_that_has_heads_code_all_the_same_fails(project, tmp_path, monkeypatch):
    (project / "hidden").mkdir()
    (project / "hidden/late.py").write_text("")
    (project / "other_side.py").write_text(MODEL.format(late=str(project / "hidden")))
    git(project, "add", ".")
    git(project, "commit", "-qm", "with a model")
    git(project, "tag", "second")
    monkeypatch.syspath_prepend(project)
    own = importlib.import_module("other_side")
    workload = Workload(own.build, own.batch, own.loss).ship()
    with ExitStack() as held:
        base, _ = environments("second", project, held)
        arm = ArmProcess(environment=base)
        try:
            with pytest.raises(ArmError, match=r"late came from .*which is not of this commit") as error:
                arm.build(ArmSpec(Case("own", "torchao", "tensorwise", emulated=True), "cpu", workload, threads=1))
        finally:
            arm.close()
    assert "Both sides would be the same code" in error.value.message
    assert "the arm 'own-torchao-tensorwise-emulated on cpu (base)'" in error.value.headline


def test_a_checkout_writes_nothing_to_the_repository(project):
    def files():
        return {path: path.read_bytes() for path in (project / ".git").rglob("*") if path.is_file()}

    before = files()
    with checkout("base", project) as tree:
        assert (tree / "in_root.py").read_text() == "SIDE = 'base'\n"
        assert files() == before
    assert files() == before


@pytest.mark.parametrize("committed", [["-a"], ["in_root.py"]])
def test_in_a_hook_the_commit_is_what_was_to_be_committed(project, committed):
    """git tells its hooks of an index of the commit's own."""
    hook = project / ".git/hooks/pre-commit"
    code = "from pathlib import Path\nfrom pytest_fp8.arms.environment import checkout\n"
    code += "with checkout('base', Path.cwd()) as tree: print((tree / 'in_root.py').read_text())"
    package = Path(__file__).parent.parent.parent
    hook.write_text(f'#!/bin/sh\nPYTHONPATH="{package}" "{sys.executable}" -c "{code}"\n')
    hook.chmod(0o755)
    git(project, "commit", "-qm", "second", *committed)
    assert git(project, "show", "HEAD:in_root.py") == "SIDE = 'head'\n"
    assert git(project, "diff", "--cached", "--name-only") == ""
