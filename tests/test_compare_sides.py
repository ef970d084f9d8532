"""The sides of a comparison: arms of two commits, on the CPU."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from pytest_fp8 import Case
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.compare.session import environments
from pytest_fp8.shipping import ship
from pytest_fp8.workload import WorkloadReference

OWN_CASE = Case("own", "torchao", "tensorwise", emulated=True)
MODEL = """
import torch
from pytest_fp8 import Workload

WIDTH = {width}


def build():
    return torch.nn.Sequential(torch.nn.Linear(32, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 32))


workload = Workload(
    build=build,
    batch=lambda step: torch.randn(16, 32),
    loss=lambda model, x: (model(x) - x).float().pow(2).mean(),
)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository whose model is 64 wide in the commit ``base`` and 128 wide in the working tree."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    (tmp_path / "compared_model.py").write_text(MODEL.format(width=64))
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"], ["tag", "base"]):
        subprocess.run([*git, *arguments], check=True)
    (tmp_path / "compared_model.py").write_text(MODEL.format(width=128))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(environment):
    workload = ship(WorkloadReference("compared_model:workload"), "the workload")
    arm = ArmProcess(environment=environment)
    try:
        facts = arm.build(ArmSpec(OWN_CASE, "cpu", workload, threads=1))
        return facts, arm.request("curve", seed=0, steps=3)["losses"]
    finally:
        arm.close()


@pytest.mark.nightly
@pytest.mark.slow
def test_two_commits_run_their_own_code_with_one_instrument(project):
    with ExitStack() as held:
        base, head = environments("base", "", project, held)
        (old, old_losses), (new, new_losses) = built(base), built(head)
        assert Path(base.import_path[0], "compared_model.py").read_text() == MODEL.format(width=64)
    assert old["parameters"] == 2 * 32 * 64 + 64 + 32
    assert new["parameters"] == 2 * 32 * 128 + 128 + 32
    assert old_losses != new_losses
    assert not Path(base.import_path[0]).exists(), "the checkout is gone"
