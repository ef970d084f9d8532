"""What goes on after a user's own load() besides weights: random states, numbers of the optimizer, and data."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.carried import carried, from_model, loss, through, with_model
from helpers.loops import build, loop
from pytest_fp8 import Verdict

pytestmark = pytest.mark.slow


def build_dropping():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 32))


def test_dropout_masks_of_a_resumed_run_are_mentioned():
    decision = carried(build=build_dropping, loss=loss, save=with_model, load=from_model)
    assert decision.verdict is Verdict.PASS, decision.message
    assert "the state of the random generators (torch) is not carried" in decision.headline


def test_a_random_state_that_is_carried_is_not_mentioned():
    def save(model, optimizer, folder):
        import torch

        with_model(model, optimizer, folder)
        torch.save(torch.get_rng_state(), folder / "random.pt")

    def load(model, optimizer, folder):
        import torch

        from_model(model, optimizer, folder)
        torch.set_rng_state(torch.load(folder / "random.pt", weights_only=True))

    decision = carried(build=build_dropping, loss=loss, save=save, load=load)
    assert "generators" not in decision.headline, decision.message


def test_a_value_that_the_optimizer_computes_anew_in_each_step_is_not_lost():
    def optimizer(parameters):
        import torch

        class Noting(torch.optim.AdamW):
            def step(self, closure=None):
                held = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
                self.gradient_norm = torch.nn.utils.get_total_norm(held)
                return super().step(closure)

        return Noting(parameters, lr=1e-3)

    decision = carried(loss=loss, optimizer=optimizer, save=with_model, load=from_model)
    assert decision.verdict is Verdict.PASS, decision.message


def test_a_counter_that_decides_the_rate_and_is_lost_is_named():
    def optimizer(parameters):
        import torch

        class Counting(torch.optim.SGD):
            count = 0

            def step(self, closure=None):
                self.count += 1
                return super().step(closure)

        made = Counting(parameters, lr=1e-3)
        made.count = 0
        return made

    decision = carried(loss=loss, optimizer=optimizer, save=with_model, load=from_model)
    assert decision.verdict is Verdict.FAIL
    assert "count 4 -> 0" in decision.message
    through_ours = carried(through("dcp"), loss=loss, optimizer=optimizer)
    assert through_ours.verdict is Verdict.PASS, through_ours.message


def test_a_loop_that_draws_its_own_data_is_no_fault_of_the_checkpoint():
    def build_with_data():
        model = build()
        model.drawn = 0
        return model

    def step(model, rows, optimizer, precision):
        import torch

        model.drawn += 1
        generator = torch.Generator().manual_seed(model.drawn)
        scale = 0.01 * 1.2**model.drawn
        return loop()(model, scale * torch.randn(96, 32, generator=generator).to(rows.dtype), optimizer, precision)

    decision = carried(build=build_with_data, step=step, save=with_model, load=from_model)
    assert decision.verdict is Verdict.INVALID, decision.message
    assert "the resumed run was given other data" in decision.message
