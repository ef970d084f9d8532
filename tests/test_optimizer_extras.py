"""What an optimizer keeps beside plain tensors, through a checkpoint of a live arm, on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch

from helpers.closures import closing, lbfgs
from helpers.loops import loop, serve
from pytest_fp8.worker.checkpoint.state import UnstorableStateError

pytestmark = pytest.mark.slow


def keeping(**given):
    """An optimizer that reads and writes a number and a nested dict, and keeps ``given`` besides."""

    def optimizer(parameters):
        class Keeping(torch.optim.Optimizer):
            def __init__(self):
                super().__init__(parameters, {})

            @torch.no_grad()
            def step(self, closure=None):
                for weight in self.param_groups[0]["params"]:
                    state = self.state[weight]
                    if not state:
                        state.update(q=torch.zeros_like(weight), scale=1.0, meta={"step": 0}, **given)
                    state["q"].mul_(0.9).add_(weight.grad, alpha=state["scale"])
                    state["meta"]["step"] += 1
                    state["scale"] = 1 / (3 + state["meta"]["step"])
                    weight.add_(state["q"].to(weight.dtype), alpha=-1e-2)

        return Keeping()

    return optimizer


def eight_bit(parameters):
    optim = pytest.importorskip("torchao.optim")

    class Eager(optim.AdamW8bit):
        """Compiling its step takes longer than all else here."""

        @torch.no_grad()
        def step(self, closure=None):
            with torch.compiler.set_stance("force_eager"):
                return super().step(closure)

    return Eager(parameters, lr=1e-2, block_size=32)


@pytest.mark.parametrize("store", ["dcp", "safetensors"])
@pytest.mark.parametrize(
    ("optimizer", "step"),
    [(keeping(), loop()), (lbfgs, closing()), (eight_bit, loop())],
    ids=["nested", "lbfgs", "8 bit"],
)
def test_training_resumes_from_state_that_is_no_plain_tensor(optimizer, step, store, tmp_path):
    def build_wide():
        # torchao keeps states of at least 4096 values in 8 bit.
        return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))

    one = serve(build=build_wide, optimizer=optimizer, step=step)
    one.curve(seed=1, steps=3)
    saved = one.save(str(tmp_path), store, optimizer=True)
    goes_on = one.resume(seed=1, first_step=3, steps=3)["losses"]
    loaded = one.load(str(tmp_path), store, optimizer=True, seed=2)
    assert loaded["optimizer_digests"] == saved["optimizer_digests"]
    assert one.resume(seed=1, first_step=3, steps=3)["losses"] == goes_on
    assert one.engine.optimizer.state, "the comparison is of an optimizer that keeps something"


def test_state_of_an_unknown_kind_is_named_before_anything_is_written(tmp_path):
    server = serve(optimizer=keeping(what=object()), step=loop())
    with pytest.raises(UnstorableStateError, match=r"optimizer/enter\.weight/what is a builtins\.object") as error:
        server.save(str(tmp_path / "store"), "dcp", optimizer=True)
    assert "resume=False" in error.value.fp8_next
    assert not (tmp_path / "store").exists()
