"""The unit of a loss: the same training passes whether its squared error is a mean or a sum."""

from __future__ import annotations

import pytest

from helpers.arms import make_model
from pytest_fp8 import Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import from_plain
from pytest_fp8.questions.ledger.evidence import ArmLedger
from pytest_fp8.questions.loss.evidence import is_cross_entropy

pytestmark = pytest.mark.slow


def classes(model, x):
    import torch

    return torch.nn.functional.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long))


def squares(model, x):
    return 100 * (model(x).float() - x.float().sin()).square().mean()


def rows(step):
    import torch

    return torch.randn(64, 32)


@pytest.mark.parametrize(("loss", "expected"), [(classes, True), (squares, False)])
def test_a_cross_entropy_is_known_by_what_the_step_executes(loss, expected):
    workload = Workload(build=make_model, batch=rows, loss=loss)
    case = Case("own", "bf16", "none", emulated=True)
    arm = ArmProcess(fork=True)
    try:
        arm.build(ArmSpec(case, "cpu", workload.ship("a test"), threads=1))
        assert is_cross_entropy(from_plain(ArmLedger, arm.request("ledger"))) is expected
    finally:
        arm.close()


SUITE = """
    import pytest
    import torch.nn.functional as F
    from torch import nn, randn
    from pytest_fp8 import Workload

    def build():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def squares(model, x):
        return F.mse_loss(model(x).float(), x.sin().float(), reduction="sum")

    @pytest.fixture
    def fp8_workload():
        return Workload(build, batch=lambda step: randn(128, 64), loss=squares)

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_loss(fp8_pair):
        fp8_pair.assert_loss()
"""


def test_a_sum_of_squares_passes_as_its_mean_does(pytester):
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-strict").assert_outcomes(passed=1)
