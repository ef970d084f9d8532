"""What a workload's own functions may give, in live arms on a CPU, and what is said where one gives something else."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("torchao")

from helpers.loops import batch, build, judge, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.backends.torchao import ComputedWeightError
from pytest_fp8.worker.answers.token_count import TokenCountError
from pytest_fp8.worker.training.step import StepError, WorkloadError

pytestmark = pytest.mark.slow


def loss(model, rows):
    return (model(rows) - rows).float().pow(2).mean()


# -- build ------------------------------------------------------------------------------------------------------------


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
    first = server.engine.curve(seed=1, steps=2)
    assert server.engine.curve(seed=1, steps=2) == first
    assert judge(server).verdict is Verdict.PASS


def test_a_model_with_a_length_of_nothing_starts_again():
    def build_empty():
        model = build()
        type(model).__len__ = lambda self: 0
        return model

    engine = serve(build=build_empty, loss=loss).engine
    assert engine.curve(seed=1, steps=1) != engine.curve(seed=2, steps=1)


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


def test_odd_rows_by_keyword_are_named():
    with pytest.raises(TokenCountError, match=r"layer 'up' was given 13 rows"):
        serve(build=build_by_keyword, loss=loss, batch=lambda step: batch(step)[:13])


def test_a_model_that_is_itself_a_linear_is_converted():
    import torch

    server = serve(build=lambda: torch.nn.Linear(32, 32), loss=loss)
    decision = judge(server)
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["converted"] == 1


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_layer_whose_weight_is_computed_is_named_and_can_be_left(norm):
    def build_normed():
        import torch

        model = build()
        getattr(torch.nn.utils.parametrizations, norm)(model.enter)
        return model

    with pytest.raises(ComputedWeightError, match="the weight of layer 'enter' is no parameter") as error:
        serve(build=build_normed, loss=loss)
    assert "Workload(leave=" in error.value.fp8_next
    assert judge(serve(build=build_normed, loss=loss, leave=("enter",))).verdict is Verdict.PASS


def test_a_layer_without_sizes_asks_for_a_forward_pass_in_build():
    import torch

    with pytest.raises(WorkloadError, match=r"'0\.weight' has no size yet") as error:
        serve(build=lambda: torch.nn.Sequential(torch.nn.LazyLinear(32)), loss=loss)
    assert "call the model once in build()" in error.value.fp8_next


# -- batch ------------------------------------------------------------------------------------------------------------


def test_a_named_tuple_stays_one():
    class Pair(NamedTuple):
        rows: Any
        wanted: Any

    def pair_loss(model, pair):
        return (model(pair.rows) - pair.wanted).float().pow(2).mean()

    server = serve(batch=lambda step: Pair(batch(step), batch(step)), loss=pair_loss)
    assert judge(server).verdict is Verdict.PASS


# -- loss -------------------------------------------------------------------------------------------------------------


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

    with pytest.raises(WorkloadError, match=rf"my_loss\(\) must give a tensor with one element, {words}") as error:
        serve(loss=my_loss)
    assert "without .item()" in error.value.fp8_next


@pytest.mark.parametrize(("keys", "named"), [(("aux", "loss"), "loss"), (("total", "aux"), "total")])
def test_a_dict_that_holds_the_loss_is_told_from_it(keys, named):
    def my_loss(model, rows):
        return dict.fromkeys(keys, model(rows).mean())

    with pytest.raises(WorkloadError, match=f"it gave a dict with '{keys[0]}', '{keys[1]}'") as error:
        serve(loss=my_loss)
    assert f"result['{named}'] in place of result" in error.value.fp8_next


@pytest.mark.parametrize(
    ("give", "words"),
    [
        (lambda rows: (rows, rows.mean()), "gave a tuple of Tensor, Tensor"),
        (lambda rows: {"logits": rows, "loss": rows.mean()}, "gave a dict with 'logits', 'loss'"),
    ],
)
def test_a_result_in_which_the_loss_is_not_found_asks_for_a_loss_function(give, words):
    def build_giving():
        import torch

        class Giving(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = build()

            def forward(self, rows):
                return give(self.inner(rows))

        return Giving()

    with pytest.raises(WorkloadError, match=f"Giving {words}") as error:
        serve(build=build_giving)
    assert "Workload(loss=" in error.value.fp8_next


# -- optimizer --------------------------------------------------------------------------------------------------------


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
            one.state = two.state = self.state

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


# -- step -------------------------------------------------------------------------------------------------------------


def test_a_step_that_runs_the_model_without_gradients_first_has_an_output():
    """The gradient cache of contrastive losses."""

    def cached(model, rows, optimizer, precision):
        import torch

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


def test_a_step_that_calls_parts_of_the_model_is_told_to_call_the_model():
    def by_parts(model, rows, optimizer, precision):
        with precision():
            hidden = model.enter(rows)
            for block in model.blocks:
                hidden = block(hidden)
        loss = hidden.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    server = serve(step=by_parts)
    with pytest.raises(StepError, match=r"by_parts\(\) did not call the model itself before") as error:
        server.logits(seed=0)
    assert "model.training_step(...)" in error.value.fp8_cause
    assert "call model(...) in the step" in error.value.fp8_next
