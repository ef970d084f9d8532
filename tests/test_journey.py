"""The README's test, the first test that init writes, and the suites as a user has them: from the wheel, in a folder
that knows no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torchao")
hatchling = pytest.importorskip("hatchling.build")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
MY_PROJECT = '''
"""A user's own project: a small vision transformer."""


def build_model():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10))


def pictures(count):
    import torch

    pixels = torch.randn(count, 3, 32, 32)
    return {"pixel_values": pixels, "labels": pixels[:, 0, :, :10].mean(1).argmax(1)}
'''
BROKEN = '''

def build_broken(whole=build_model):
    """The first product of each MLP goes past its layer once that is converted, and so past FP8."""
    import torch

    class Hidden(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            if type(self.linear) is torch.nn.Linear:
                return self.linear(x)
            return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias)

    model = whole()
    for block in model.vit.layers:
        block.mlp.fc1 = Hidden(block.mlp.fc1)
    return model


build_model = build_broken
'''


def readme_test():
    """The README's first test, with the model and the data of the user's own project."""
    section = (ROOT / "README.md").read_text().split("## A first test")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    mine = "from my_project import build_model, pictures"
    code, models = re.subn(r"def build\(\):\n.*?\n\n", f"{mine}\n\n", code, flags=re.DOTALL)
    code, workloads = re.subn(r"Workload\(.*\)\n", "Workload(build_model, batch=lambda step: pictures(16))\n", code)
    assert (models, workloads) == (1, 1)
    return code


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, its entry point included, as ``pip install --target`` leaves it."""
    folder, built = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(built)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(folder, installed, project):
    (folder / "my_project.py").write_text(project)
    (folder / "test_my_project.py").write_text(readme_test())
    # -m pytest puts the user's own folder on the path.
    return python(folder, installed, "-m", "pytest", "-p", "no:cacheprovider", "test_my_project.py")


def python(folder, installed, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    environment["PYTHONPATH"] = str(installed)
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.nightly
def test_the_readme_s_test_passes_for_a_vision_transformer(tmp_path, installed):
    code, output = run(tmp_path, installed, MY_PROJECT)
    assert code == 0, output
    assert re.search(r"own-torchao-tensorwise-emulated \[1\] +12/13 +\d+\.\d%", output), output
    # The patch embedding is a convolution.
    note = r"\[1\] \d+\.\d% of these FLOPs are outside the Linears, in high precision: convolution of vit"
    assert re.search(note, output), output
    assert "1 passed" in output


@pytest.mark.nightly
def test_a_broken_model_fails_in_the_same_test_and_says_where(tmp_path, installed):
    code, output = run(tmp_path, installed, MY_PROJECT + BROKEN)
    assert code == 1, output
    assert "FAIL FP8-L28: 2 converted layer(s) are never called, which the reference calls" in output, output
    assert "vit.layers.0.mlp.fc1.linear, vit.layers.1.mlp.fc1.linear" in output


@pytest.mark.nightly
def test_the_suites_come_with_the_wheel(tmp_path, installed):
    code, output = python(tmp_path, installed, "-m", "pytest_fp8.cli", "suites", "--collect-only", "-q")
    assert code == 0, output
    assert "suites/test_questions.py::test_layers" in output
    assert "suites/test_controls.py::" in output
