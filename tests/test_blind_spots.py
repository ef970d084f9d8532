"""What a training run can hide: weights used without their layer, calls without gradients, schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.evidence import verdict_of
from helpers.loops import CASE, batch, build, judge, judge_both, loop, serve
from pytest_fp8 import Case, Verdict, Workload
from pytest_fp8.codes import L
from pytest_fp8.zoo import adapters

pytestmark = pytest.mark.slow


def frozen_bypass():
    """A net that uses the weight of its frozen second layer without calling the layer."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.middle, self.out = (torch.nn.Linear(i, o) for i, o in ((32, 32), (32, 64), (64, 32)))
            self.middle.requires_grad_(False)

        def forward(self, x):
            hidden = torch.nn.functional.linear(self.enter(x), self.middle.weight, self.middle.bias)
            return self.out(hidden)

    return Net()


def squares(model, x):
    return (model(x) - x).float().pow(2).mean()


def test_a_layer_whose_weight_is_used_without_a_call_is_not_in_fp8():
    decision = judge_both(build=frozen_bypass, loss=squares)
    verdict_of(decision, Verdict.FAIL, L.FPROP_NOT_IN_FP8, "middle, bfloat16 by the model itself")
    assert decision.numbers["fp8_share"] < 0.7, "its products run in high precision"


def test_a_layer_may_stay_unused_where_no_product_has_its_size():
    import torch

    def resting():
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.enter, self.expert = torch.nn.Linear(32, 32), torch.nn.Linear(32, 64)

            def forward(self, x):
                return self.enter(x)

        return Net()

    decision = judge(serve(build=resting, loss=squares))
    assert decision.verdict is Verdict.PASS, decision.message


def test_a_part_called_without_gradients_is_no_training():
    import torch

    def step(model, x, optimizer, precision):
        with torch.no_grad(), precision():
            target = model.enter(x)
        with precision():
            loss = (model(x) - target).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    decision = judge(serve(step=step))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["wgrad"] == {"expected": 5, "fp8": 5}


def warming(parameters):
    """A learning rate that starts at zero: without a step of the schedule nothing is trained."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    return optimizer


def test_a_schedule_is_stepped_without_an_own_step():
    losses = serve(loss=squares, batch=lambda step: batch(0), optimizer=warming).curve(0, 8)["losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_an_own_step_trains_through_accelerates_optimizer():
    pytest.importorskip("accelerate")
    case = replace(CASE, backend="accelerate_torchao")
    server = serve(case, step=loop(2, clip=1.0))
    decision = judge(server, case)
    assert decision.verdict is Verdict.PASS, decision.message
    assert server.curve(0, 3)["losses"][2] < server.curve(0, 3)["losses"][0]


def test_a_layer_that_the_workload_leaves_and_accelerate_converts_is_named():
    pytest.importorskip("accelerate")
    case = replace(CASE, backend="accelerate_torchao")
    decision = judge(serve(case, step=loop(), leave=("blocks.0.up",)), case)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "blocks.0.up" in decision.message


def test_the_learning_rate_of_adapters_is_the_users_or_their_default():
    pytest.importorskip("peft")
    from pytest_fp8.backends import backend
    from pytest_fp8.worker.training.setup import TrainingSetup

    def rate(**given):
        import torch

        case = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True, lora=4, lora_targets=("up",))
        setup = TrainingSetup(
            case, Workload(build=build, batch=batch, **given), backend("torchao"), torch.device("cpu")
        )
        return setup.optimizer(setup.fresh_model(0)).param_groups[0]["lr"]

    assert rate() == adapters.LEARNING_RATE
    assert rate(learning_rate=1e-5) == 1e-5


def test_the_adapters_rate_that_no_hash_holds_is_as_it_was_measured():
    assert adapters.LEARNING_RATE == 2e-4, "raise 'measurement' in Case.digest() with the rate, then this line"
