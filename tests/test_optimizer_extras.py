"""What an optimizer keeps beside plain tensors, through a checkpoint of a live arm, on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

import torch

from helpers.closures import closing, lbfgs
from helpers.loops import loop, serve
from pytest_fp8.worker.state import optimizer_extras

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
    one.engine.restart(seed=2)
    loaded = one.load(str(tmp_path), store, optimizer=True)
    assert loaded["optimizer_digests"] == saved["optimizer_digests"]
    assert one.resume(seed=1, first_step=3, steps=3)["losses"] == goes_on
    assert one.engine.optimizer.state, "the comparison is of an optimizer that keeps something"


def test_state_of_an_unknown_kind_is_named_before_anything_is_written(tmp_path):
    server = serve(optimizer=keeping(what=object()), step=loop())
    with pytest.raises(
        optimizer_extras.UnstorableStateError, match=r"optimizer/enter\.weight/what is a builtins\.object"
    ) as error:
        server.save(str(tmp_path / "store"), "dcp", optimizer=True)
    assert "resume=False" in error.value.fp8_next
    assert not (tmp_path / "store").exists()


def test_each_part_of_a_fused_weight_gets_its_numbers_and_tensors_are_refused():
    fused = {"qkv": [("q", slice(0, 4)), ("k", slice(4, 8))]}
    assert optimizer_extras.for_each_part("qkv", "step", 3, fused) == [("q", 3), ("k", 3)]
    assert optimizer_extras.for_each_part("other", "step", {"t": torch.zeros(1)}, fused)[0][0] == "other"
    with pytest.raises(optimizer_extras.UnstorableStateError, match="qkv/old is a list of tensors"):
        optimizer_extras.for_each_part("qkv", "old", [torch.zeros(8)], fused)


def test_different_contents_have_different_leaves():
    def of(value):
        return {name: leaf.tolist() for name, leaf in optimizer_extras.leaves("x", value)}

    assert of({"a": [1, 2.5, None, "b"]}) == of({"a": (1, 2.5, None, "b")})
    assert of({"a": [1]}) != of({"a": [2]}) != of({"b": [2]})
    assert of({"a": torch.ones(2)}) == {"x['a']": [1.0, 1.0]}


class Foreign(torch.Tensor):
    """A tensor class that no library has declared safe to load."""


def test_a_pickled_class_that_is_not_declared_safe_is_not_loaded(tmp_path):
    optimizer_extras.write({"optimizer/w/q": torch.zeros(2).as_subclass(Foreign)}, tmp_path)
    with pytest.raises(optimizer_extras.UnstorableStateError, match=r"test_optimizer_extras\.Foreign"):
        optimizer_extras.read(tmp_path)
