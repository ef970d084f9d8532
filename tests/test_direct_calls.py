"""Layers that a model calls as ``layer.forward(x)``, which runs none of torch's hooks, are watched like any other."""

from __future__ import annotations

import copy
import pickle

import pytest

pytest.importorskip("torchao")

from helpers.evidence import verdict_of
from helpers.loops import CASE, judge_both, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.worker.answers.token_count import TokenCountError
from pytest_fp8.worker.training.restored import followed, hooked

pytestmark = pytest.mark.slow


def build(kept=False):
    """Two Linears whose ``forward`` is called; ``kept``: through references from before the conversion."""
    import torch

    class Direct(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
            self.kept = [self.up, self.down]

        def forward(self, x):
            up, down = self.kept if kept else (self.up, self.down)
            return down.forward(torch.nn.functional.gelu(up.forward(x)))

    return Direct()


def loss(model, batch):
    return (model(batch) - batch).float().square().mean()


@pytest.mark.parametrize("given", [{"loss": loss}, {"step": loop(parts=2)}], ids=["loss", "step"])
def test_layers_that_are_called_directly_are_seen(given):
    verdict_of(judge_both(build=build, **given), Verdict.PASS, "2 of 2 Linears in FP8")


def test_unconverted_layers_that_are_called_directly_still_fail():
    decision = judge_both(build=lambda: build(kept=True), loss=loss)
    verdict_of(decision, Verdict.FAIL, "never called", "references to the unconverted modules")


def test_rows_of_a_layer_that_is_called_directly_are_counted():
    def short(step):
        import torch

        return torch.randn(90, 32)

    with pytest.raises(TokenCountError, match="layer 'up' was given 90 rows"):
        serve(CASE, build=build, batch=short, loss=loss)


# -- what follows such calls ------------------------------------------------------------------------------------------


def watched(layer):
    """Hooks that note each call's beginning and end, and what they have noted."""
    seen = []

    def noting(what):
        return lambda *_: seen.append(what)

    hooks = [layer.register_forward_pre_hook(noting("begins")), layer.register_forward_hook(noting("ends"))]
    return [*followed([layer]), *hooks], seen


def linear(kind=None):
    import torch

    return (kind or torch.nn.Linear)(4, 2), torch.ones(3, 4)


@pytest.mark.parametrize("call", [lambda layer, x: layer(x), lambda layer, x: layer.forward(x)], ids=["()", "forward"])
def test_a_call_runs_hooks_once_however_it_is_made(call):
    layer, x = linear()
    plain = call(layer, x)
    handles, seen = watched(layer)
    with hooked(handles):
        assert call(layer, x).equal(plain)
    assert seen == ["begins", "ends"]
    call(layer, x)
    assert seen == ["begins", "ends"]
    assert "forward" not in vars(layer)


def test_a_forward_that_goes_on_in_its_base_class_is_one_call():
    import torch

    class Scaled(torch.nn.Linear):
        def __call__(self, x):
            return self.forward(x)

        def forward(self, x):
            return 2 * super().forward(x)

    layer, x = linear(Scaled)
    expected = layer(x)
    handles, seen = watched(layer)
    with hooked(handles):
        assert layer(x).equal(expected)
    assert seen == ["begins", "ends"]


def test_a_hook_that_calls_forward_is_no_call_of_its_own():
    layer, x = linear()
    layer.register_forward_hook(lambda module, args, output: output + module.forward(*args))
    expected = layer(x)
    handles, seen = watched(layer)
    with hooked(handles):
        assert layer(x).equal(expected)
    assert seen == ["begins", "ends"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_that_is_made_meanwhile_calls_itself(copied):
    import torch

    layer, x = linear()
    with hooked(followed([layer])):
        other = copied(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert other.forward(x).equal(other(x))
    assert not other.forward(x).equal(layer(x))
