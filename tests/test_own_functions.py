"""What a workload's own batch(), loss() and step() may give, in live arms on a CPU; what is said of anything else."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchao")

from helpers.loops import build, serve
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda rows: rows.mean().item(), "it gave a float"),
        (lambda rows: None, "it gave nothing"),
        (lambda rows: rows.mean(1), r"it gave a tensor of shape \(96,\)"),
        (lambda rows: rows.mean().detach(), "it gave a tensor without a gradient"),
    ],
)
def test_a_loss_that_is_none_names_itself(give, words):
    def my_loss(model, rows):
        return give(model(rows))

    with pytest.raises(WorkloadError, match=rf"my_loss\(\) must give its loss as a tensor .* {words}") as error:
        serve(loss=my_loss)
    assert "without .item()" in error.value.fp8_next


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda rows: (rows, rows.mean()), "gave a tuple of Tensor, Tensor"),
        (lambda rows: {"logits": rows, "loss": rows.mean()}, "gave a dict with 'logits', 'loss'"),
    ],
)
def test_a_result_in_which_the_loss_is_not_found_asks_for_a_loss_function(give, words):
    def build_giving():

        class Giving(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = build()

            def forward(self, rows):
                return give(self.inner(rows))

        return Giving()

    with pytest.raises(WorkloadError, match=f"Giving .* it {words}") as error:
        serve(build=build_giving)
    assert "Workload(loss=" in error.value.fp8_next


def test_a_step_that_runs_the_model_without_gradients_first_has_an_output():
    """The gradient cache of contrastive losses."""

    def cached(model, rows, optimizer, precision):

        with torch.no_grad(), precision():
            whole = model(rows)
        leaf = whole.detach().requires_grad_(True)
        objective = leaf.float().pow(2).mean()
        objective.backward()
        for part, gradient in zip(rows.chunk(2), leaf.grad.chunk(2), strict=True):
            with precision():
                model(part).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()
        return objective.detach()

    server = serve(step=cached)
    assert server.logits(seed=0)
