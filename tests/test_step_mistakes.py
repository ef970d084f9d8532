"""Hand-written steps that are none: without an optimizer, a backward pass, a loss or rows that FP8 can take."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.loops import loop, serve
from pytest_fp8.said import WorkloadError

pytestmark = pytest.mark.slow


def test_a_step_that_forgets_the_optimizer_says_so():
    def forgetful_step(model, batch, optimizer, precision):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises(WorkloadError, match=r"forgetful_step\(\) never called optimizer.step\(\)") as error:
        serve(step=forgetful_step)
    assert "accumulated over several calls" in error.value.fp8_cause


@pytest.mark.parametrize(
    ("given", "words"), [(None, "it gave nothing"), (0.5, "it gave a float"), ("all", r"a tensor of shape \(96, 32\)")]
)
def test_a_step_that_gives_no_loss_names_itself(given, words):
    whole = loop()

    def my_step(model, batch, optimizer, precision):
        whole(model, batch, optimizer, precision)
        return batch if given == "all" else given

    with pytest.raises(WorkloadError, match=rf"my_step\(\) must give its loss .*{words}"):
        serve(step=my_step)


def test_a_step_that_raises_leaves_nothing_patched():
    import torch

    before = torch.autograd.backward, torch.autograd.grad

    def step(model, batch, optimizer, precision):
        model(batch)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        serve(step=step)
    assert (torch.autograd.backward, torch.autograd.grad) == before
