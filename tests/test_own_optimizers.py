"""What a workload's own optimizer() may give, in live arms on a CPU: two, and one of the model's own."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torchao")

from helpers.arms import square as loss
from helpers.loops import ledgers, serve
from pytest_fp8.worker.training.setup import takes_model
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


def build_with_groups():
    """As nanoGPT's model: it makes its own optimizer, with groups by name and shape."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm, self.down = torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32)

        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.norm(self.up(x))))

        def configure_optimizers(self, weight_decay, rate):
            named = dict(self.named_parameters())
            decayed = [p for name, p in named.items() if p.dim() >= 2 and not name.startswith("down")]
            groups = [
                {"params": decayed, "weight_decay": weight_decay},
                {"params": [named["down.weight"]], "weight_decay": 0.0, "lr": rate / 10},
                {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=rate)

    return Net()


def configure(model, weight_decay=0.1, rate=1e-3):
    return model.configure_optimizers(weight_decay, rate)


class Settings:
    def optimizer(self, model):
        return configure(model)


def test_a_function_whose_argument_is_called_model_is_given_the_model_in_both_arms():
    both_arms = ledgers(build=build_with_groups, loss=loss, optimizer=Settings().optimizer)
    for arm in (both_arms.reference, both_arms.fp8):
        made = arm.optimizer
        assert made.members == {name: GROUP_OF[name] for name in made.members}
        assert made.members.keys() == GROUP_OF.keys()
        assert [group["weight_decay"] for group in made.groups] == ["0.1", "0", "0"]
        assert made.groups[1]["lr"] == "0.0001"
    assert both_arms.fp8.fp8_layers == ["down", "up"]


GROUP_OF = {"up.weight": 0, "down.weight": 1} | dict.fromkeys(["up.bias", "norm.weight", "norm.bias", "down.bias"], 2)


def test_any_other_name_is_given_the_parameters():
    assert takes_model(functools.partial(configure, weight_decay=0.1))
    assert not takes_model(lambda parameters: None)
    assert not takes_model(lambda models: None)
    assert not takes_model(functools.partial(configure, None))
    assert not takes_model(two)
