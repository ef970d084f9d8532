"""The journey of a user with their own model, from a test file to a verdict; arms are real, on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

pytestmark = pytest.mark.slow

HEAD = """
import math, pytest, torch
from torch import nn
from pytest_fp8 import Case, Workload

def workload(**changes):
    @pytest.fixture
    def fp8_workload():
        parts = {
            "build": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
            "batch": lambda step: torch.randn(16, 32),
            "loss": lambda model, x: (model(x) - x).float().square().mean(),
        }
        return Workload(**{**parts, **changes})

    return fp8_workload

"""


def ask(*questions, mark="recipe='rowwise', emulated=True, steps=20, seeds=3", changes=""):
    body = "\n".join(f"    fp8_pair.assert_{question}()" for question in questions)
    return f"fp8_workload = workload({changes})\n\n@pytest.mark.fp8({mark})\ndef test_mine(fp8_pair):\n{body}\n"


def run(pytester, module, *arguments):
    pytester.makepyfile(HEAD + module)
    return pytester.runpytest(*arguments)


def test_the_same_workload_reads_its_baseline_and_another_version_calls_it_stale(pytester):
    run(pytester, ask("layers"), "--fp8-update=first").assert_outcomes(passed=1)
    assert (pytester.path / "baselines/emulated/own-torchao-rowwise-emulated.json").is_file()
    run(pytester, ask("layers")).assert_outcomes(passed=1)
    result = run(pytester, ask("layers", changes="version=2"))
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*another definition of case*", "*functions, its version=*", "*-k own-torchao*"])


def test_a_library_that_keeps_global_state_is_not_let_into_the_test_s_own_process(pytester):
    case = "Case('tiny', 'accelerate_torchao', 'tensorwise', emulated=True)"
    result = run(
        pytester, f"@pytest.mark.fp8(cases=[{case}])\ndef test_weights(fp8_model):\n    raise AssertionError\n"
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*changes the whole process it is used in*", "*use fp8_pair, or fp8_pair.fp8.call(*"])


SPARSE = """
    build=lambda: nn.Sequential(nn.Embedding(256, 64, sparse=True), nn.Linear(64, 128), nn.Linear(128, 64)),
    batch=lambda step: torch.randint(0, 256, (128,)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    loss=lambda model, x: (model(x) - torch.sin(x[:, None] * torch.arange(64) / 64)).float().square().mean(),
"""


def test_sparse_gradients_are_gradients(pytester):
    every = ask("layers", "numerics", "loss", "checkpoints", mark="emulated=True", changes=SPARSE)
    run(pytester, every, "--fp8-strict").assert_outcomes(passed=1)


def test_an_arms_error_is_printed_once_with_the_way_to_its_page(pytester):
    module = ask("layers", mark="emulated=True", changes="build=lambda: torch.load('weights.pt')")
    said = run(pytester, module, "-q").outlines
    assert len([line for line in said if "in the arm 'own-bf16-emulated on cpu'" in line]) == 1
    assert "next:     name the file from the folder of the test file: Path(__file__).parent / 'weights.pt'" in "".join(
        said
    )
    assert "[1] FP8-R04: see above" in said
    assert any(line.startswith("what a code means: pytest-fp8 explain FP8-R04; documentation: ") for line in said)
