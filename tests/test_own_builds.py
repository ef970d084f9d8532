"""What a workload's own build() may give, in live arms on a CPU: hooks, compiled pieces, layers of many kinds."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.arms import square as loss
from helpers.loops import build, judge, serve
from pytest_fp8 import Verdict
from pytest_fp8.codes import R
from pytest_fp8.worker.error_trace import known_cause

pytestmark = pytest.mark.slow


def doubling():
    import torch

    class Doubling(torch.nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    model = build()
    model.enter = Doubling(32, 32)
    return model


def hooked():
    model = build()
    model.enter.register_forward_hook(lambda module, args, output: output * 2)
    return model


def pre_hooked():
    model = build()
    model.enter.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


def hooked_in_itself():
    model = build()
    plain = model.enter.forward
    model.enter.forward = lambda x: plain(2 * x)
    return model


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (doubling, "the forward of "),
        (hooked, "a forward hook"),
        (pre_hooked, "a forward pre-hook"),
        (hooked_in_itself, "a forward of its own"),
    ],
)
def test_what_a_linear_does_besides_its_product_and_its_fp8_layer_does_not_is_named(made, what):
    decision = judge(serve(build=made, loss=loss))
    assert decision.verdict is Verdict.FAIL, decision.message
    assert f"enter: {what}" in decision.message
    assert judge(serve(build=made, loss=loss, leave=("enter",))).verdict is Verdict.PASS


def test_a_model_that_build_compiled_starts_again():
    import torch

    server = serve(build=lambda: torch.compile(build(), backend="eager"), loss=loss)
    first = server.curve(seed=1, steps=2)
    assert server.curve(seed=1, steps=2) == first
    assert judge(server).verdict is Verdict.PASS


def build_by_keyword():
    import torch

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x):
            return self.down(input=self.up(input=x).relu())

    return Named()


def test_layers_that_are_called_by_keyword_are_seen():
    server = serve(build=build_by_keyword, loss=loss)
    assert judge(server).verdict is Verdict.PASS
    assert {product["layer"] for product in server.numerics(moved=False)["products"]} == {"up", "down"}


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_layers_whose_weight_is_computed_are_named_and_can_be_left(norm):
    def build_normed():
        import torch

        model = build()
        for layer in (model.enter, model.blocks[1].up):
            getattr(torch.nn.utils.parametrizations, norm)(layer)
        return model

    with pytest.raises(TypeError, match="as parameter 'weight'") as error:
        serve(build=build_normed, loss=loss)
    assert known_cause(error.value)[0] is R.COMPUTED_WEIGHT
    assert judge(serve(build=build_normed, loss=loss, leave=("enter", "blocks.1.up"))).verdict is Verdict.PASS


def test_a_piece_of_the_model_that_is_compiled_in_one_piece_is_looked_into():
    def build_compiled():
        import torch

        class Compiled(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.enter = torch.nn.Linear(32, 32)
                self.act = torch.compile(lambda x: self.enter(x).relu() * 2, fullgraph=True, backend="eager")

            def forward(self, x):
                return self.act(x)

        return Compiled()

    decision = judge(serve(build=build_compiled, loss=loss))
    assert decision.verdict is Verdict.PASS, decision.message
