"""What a workload's own optimizer() may give, in live arms on a CPU: two, two as one, a compiled one."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.arms import square as loss
from helpers.loops import judge, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow


def two(parameters):
    import torch

    half = list(parameters)
    return [torch.optim.AdamW(half[:2]), torch.optim.SGD(half[2:])]


def test_two_optimizers_are_told_to_be_one():
    with pytest.raises(
        WorkloadError, match=r"optimizer two\(\) must give one .* it gave a list of AdamW, SGD"
    ) as error:
        serve(loss=loss, optimizer=two)
    assert "parameter groups" in error.value.fp8_next


def both(parameters):
    """Two as one, as the message says how."""
    import torch

    class Both(torch.optim.Optimizer):
        def __init__(self, one, two):
            super().__init__([*one.param_groups, *two.param_groups], {})
            self.one, self.two = one, two
            self.share()

        def share(self):
            self.one.state = self.two.state = self.state
            self.one.param_groups, self.two.param_groups = self.param_groups[:1], self.param_groups[1:]

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.share()

        def step(self, closure=None):
            self.one.step()
            self.two.step()

    return Both(*two(parameters))


def test_two_as_one_are_saved_loaded_and_resumed(tmp_path):
    server = serve(loss=loss, optimizer=both)
    server.engine.curve(seed=1, steps=3)
    saved = server.save(str(tmp_path), "dcp", optimizer=True)
    goes_on = server.resume(seed=1, first_step=3, steps=3)["losses"]
    server.engine.restart(seed=2)
    assert server.load(str(tmp_path), "dcp", optimizer=True)["optimizer_digests"] == saved["optimizer_digests"]
    assert server.resume(seed=1, first_step=3, steps=3)["losses"] == goes_on


def compiled(parameters):
    """Steps in code that is compiled in one piece or not at all, and multiplies."""
    import torch

    @torch.compile(fullgraph=True, backend="eager")
    def change(weight, gradient):
        return weight.add_(gradient @ torch.eye(gradient.shape[-1], dtype=gradient.dtype), alpha=-1e-3)

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.dim() == 2:
                        change(weight, weight.grad)

    return Compiled(parameters)


@pytest.mark.parametrize("step", [None, loop()], ids=["loss", "step"])
def test_products_of_an_optimizer_compiled_in_one_piece_are_no_layer_s(step):
    decision = judge(serve(step=step, loss=loss, optimizer=compiled))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["fp8_share"] == 1.0
