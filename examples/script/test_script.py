"""A train.py that has no functions: it is run with --steps 0, and what it made is asked."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from pytest_fp8 import Workload

TRAIN = Path(__file__).with_name("train.py")
MADE = {}


def run(*words):
    """All that the script made. Each call runs it anew, in the arm's process."""
    sys.argv = ["train.py", "--steps", "0", *words]
    return runpy.run_path(str(TRAIN))


def build():
    return run()["model"]


def batch(step):
    if not MADE:
        MADE.update(run())
    return MADE["get_batch"]()


def loss(model, batch):
    """Again what the loop of the script does: nothing can take it from there."""
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).float(), targets)


def optimizer(parameters):
    (group,) = run()["optimizer"].param_groups
    return torch.optim.AdamW(parameters, lr=group["lr"], weight_decay=group["weight_decay"])


def convert(model):
    """The script's own conversion: its model in FP8, with the weights, the device and the type of the arm's."""
    made = run("--fp8")["model"].to(model[0].weight)
    made.load_state_dict(model.state_dict())
    return made


@pytest.fixture
def fp8_workload():
    return Workload(build, batch, loss, optimizer=optimizer, convert=convert)


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True, name="script")
def test_without_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()


@pytest.mark.fp8(backend="torchao", recipe="tensorwise", name="script")
def test_on_a_gpu(fp8_pair):
    fp8_pair.assert_layers()
    fp8_pair.assert_numerics()
    fp8_pair.assert_loss()
