"""Hand-written steps in live arms, on a CPU: what is training in them, what is not, and what is no step at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.loops import CASE, batch, build, judge, loop, serve
from pytest_fp8 import Verdict
from pytest_fp8.worker.answers.token_count import TokenCountError
from pytest_fp8.worker.training.step import StepError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_micro_batch_is_accounted_for(parts):
    decision = judge(serve(step=loop(parts, clip=1.0)))
    assert decision.verdict is Verdict.PASS, decision.message
    owed = {"fprop": 5 * parts, "dgrad": 4 * parts, "wgrad": 5 * parts}
    assert decision.numbers["roles"] == {role: {"expected": n, "fp8": n} for role, n in owed.items()}
    assert decision.numbers["fp8_share"] == 1.0


def test_micro_batches_whose_sizes_differ_are_accounted_for():
    def step(model, batch, optimizer, precision):
        for rows in batch.split([64, 32]):
            loss = model(rows).float().pow(2).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    decision = judge(serve(step=step))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["wgrad"] == {"expected": 10, "fp8": 10}


def test_one_backward_for_a_sum_of_losses_is_accounted_for():
    def step(model, batch, optimizer, precision):
        loss = sum(model(rows).float().pow(2).mean() for rows in batch.chunk(2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    decision = judge(serve(step=step))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["fp8_share"] == 1.0


def test_an_evaluation_between_steps_is_no_training_and_no_failure():
    decision = judge(serve(step=loop(2, evaluate=True)))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["fprop"] == {"expected": 10, "fp8": 10}
    assert decision.numbers["fp8_share"] == 1.0


class Clock:
    """In place of a CUDA event on a machine without a GPU: it records the time of the test's clock."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.mark.parametrize(("every", "evaluated"), [(None, 0.0), (1, 40.0), (3, 40.0), (10, 1000.0)])
def test_an_evaluation_every_so_many_steps_is_not_timed(monkeypatch, every, evaluated):
    """A step takes 10 ms, an evaluation ``evaluated`` ms; once, the blocks with an evaluation in them took longer."""
    import torch

    monkeypatch.setattr(torch.cuda, "Event", Clock)
    steps = iter(range(1000))

    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.only = torch.nn.Linear(32, 32)

        def forward(self, x):
            Clock.now += 10.0 if torch.is_grad_enabled() else evaluated
            return self.only(x)

    def step(model, batch, optimizer, precision):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if every and next(steps) % every == 0:
            model.eval()
            with torch.no_grad():
                model(batch)
            model.train()
        return loss

    # Without a conversion, which would make FP8's forward of the model another class's.
    server = serve(replace(CASE, backend="bf16", recipe="none"), build=Takes, step=step)
    # More steps are dropped than there are batches.
    assert server.blocks(count=4, steps=3, dropped=9)["milliseconds"] == [10.0] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_the_model_is_seen_without_being_declared(reentrant):
    decision = judge(serve(build=lambda: build(True, reentrant), step=loop(2)))
    assert decision.verdict is Verdict.PASS, decision.message
    # Two blocks in each of two micro-batches; torch ends a recomputation before its last product where it can.
    assert decision.numbers["roles"]["recompute"]["expected"] == 8
    assert decision.numbers["roles"]["recompute"]["fp8"] >= 4
    assert decision.numbers["fp8_share"] == 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_the_model_is_seen_without_an_own_step(reentrant):
    decision = judge(serve(build=lambda: build(True, reentrant), loss=lambda model, x: model(x).float().pow(2).mean()))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["recompute"]["expected"] == 4
    assert decision.numbers["fp8_share"] == 1.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_evaluation_in_the_loss_of_a_checkpointed_model_is_no_training(reentrant):
    def loss(model, x):
        import torch

        with torch.no_grad():
            target = model(x)
        return (model(x) - target.flip(0)).float().pow(2).mean()

    decision = judge(serve(build=lambda: build(True, reentrant), loss=loss))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["recompute"]["expected"] == 4


def test_a_recomputation_outside_fp8_is_found():
    def build_broken():
        import torch

        class HalfOff(torch.nn.Module):
            """Multiplies in high precision in the backward pass, as with a context that is not restored there."""

            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(32, 64)

            def forward(self, x):
                if torch._C._current_graph_task_id() != -1:
                    return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)
                return self.inner(x)

        model = build(True)
        for block in model.blocks:
            block.up = HalfOff()
        return model

    decision = judge(serve(build=build_broken, step=loop()))
    assert decision.verdict is Verdict.FAIL, decision.message
    assert "recompute of 2 of" in decision.headline


def test_a_step_that_forgets_the_optimizer_says_so():
    def forgetful_step(model, batch, optimizer, precision):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        return loss

    with pytest.raises(StepError, match=r"forgetful_step\(\) never called optimizer.step\(\)") as error:
        serve(step=forgetful_step)
    assert "accumulated over several calls" in error.value.fp8_cause


def test_a_step_that_never_goes_backward_says_so():
    def step(model, batch, optimizer, precision):
        optimizer.step()
        return model(batch).float().pow(2).mean()

    with pytest.raises(StepError, match="never went backward"):
        serve(step=step)


@pytest.mark.parametrize(
    ("given", "words"), [(None, "it gave nothing"), (0.5, "it gave a float"), ("all", r"a tensor of shape \(96, 32\)")]
)
def test_a_step_that_gives_no_loss_names_itself(given, words):
    whole = loop()

    def my_step(model, batch, optimizer, precision):
        whole(model, batch, optimizer, precision)
        return batch if given == "all" else given

    with pytest.raises(StepError, match=rf"my_step\(\) must give its loss .*{words}"):
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


def scheduled(parameters):
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=6)
    return optimizer


def scheduled_step(model, batch, optimizer, precision):
    loss = loop(2)(model, batch, optimizer, precision)
    optimizer.scheduler.step()
    return loss


def test_a_schedule_restarts_with_each_curve_and_resumes_from_a_checkpoint(tmp_path):
    one, two = (serve(step=scheduled_step, optimizer=scheduled) for _ in range(2))
    first = one.engine.curve(seed=1, steps=4)
    assert one.engine.curve(seed=1, steps=4) == first
    one.save(str(tmp_path), "dcp", optimizer=True)
    goes_on = one.resume(seed=1, first_step=4, steps=4)
    two.engine.curve(seed=2, steps=1)
    two.load(str(tmp_path), "dcp", optimizer=True)
    assert two.resume(seed=1, first_step=4, steps=4)["losses"] == goes_on["losses"]


def test_a_step_may_skip_losses_that_are_not_finite():
    healthy = loop()

    def step(model, batch, optimizer, precision):
        if float(batch.sum()) > 0:
            return batch.new_tensor(float("nan"))
        return healthy(model, batch, optimizer, precision)

    curve = serve(step=step).engine.curve(seed=0, steps=8)
    assert len(curve["gradient_norms"]) == len(curve["losses"]) == 8
    assert any(math.isnan(loss) for loss in curve["losses"])


def test_clipping_is_seen_in_the_gradient_norms():
    norms = serve(step=loop(2, clip=0.01, set_to_none=False)).engine.curve(seed=0, steps=3)["gradient_norms"]
    assert all(norm < 0.0102 for norm in norms)


def test_outputs_are_compared_without_training_and_for_any_kind_of_batch():
    inner = loop(2)
    server = serve(
        batch=lambda step: (batch(step), batch(step)),
        step=lambda model, pair, optimizer, precision: inner(model, pair[0], optimizer, precision),
    )
    server.engine.restart(seed=3)
    first = server.logits(seed=0)
    assert len(first) == 4 + 4 * 48 * 32, "a fingerprint, and float32 of one micro-batch"
    assert server.logits(seed=0) == first


def test_calibration_passes_of_a_step_change_no_weight(monkeypatch):
    server = serve(step=scheduled_step, optimizer=scheduled)
    opened = []
    server.engine.restart(seed=0)
    weights = {name: value.clone() for name, value in server.engine.model.named_parameters()}
    plain = server.engine.precision
    server.engine.precision = lambda: opened.append(1) or plain()
    monkeypatch.setattr(type(server.engine.backend), "calibration_passes", lambda *_: 2)
    server.engine.restart(seed=0)
    assert len(opened) == 4
    assert all(weights[name].equal(value) for name, value in server.engine.model.named_parameters())
    assert server.engine.optimizer.scheduler.last_epoch == 0


def test_an_odd_micro_batch_names_the_layer_its_rows_and_the_helper():
    with pytest.raises(TokenCountError, match=r"layer 'enter' was given 24 rows") as error:
        serve(step=loop(4))
    assert "pytest_fp8.pad_to_multiple" in error.value.fp8_next


def convert_but(*left):
    def convert(model):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name not in left)

    return convert


def test_an_own_conversion_is_judged():
    decision = judge(serve(step=loop(), convert=convert_but()))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["converted"] == 5


def test_an_own_conversion_that_skips_a_layer_without_a_reason_fails():
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down")))
    assert decision.verdict is Verdict.FAIL
    assert "neither converted nor left with a reason" in decision.headline
    assert "blocks.1.down" in decision.seen
    assert "Workload(leave=" in decision.next_step


def test_a_layer_that_the_workload_leaves_is_skipped_with_that_reason():
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down"), leave=("blocks.1.*",)))
    assert decision.verdict is Verdict.FAIL, "blocks.1.up is left by name and was converted"
    decision = judge(serve(step=loop(), convert=convert_but("blocks.1.down"), leave=("*.1.down",)))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["skipped"] == {"filter: the workload leaves '*.1.down'": 1}
    decision = judge(serve(step=loop(), leave=("*.down",)))
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["skipped"] == {"filter: the workload leaves '*.down'": 2}


def test_an_own_conversion_that_renames_layers_is_an_error():
    def convert(model):
        import torch

        convert_but()(model)
        return torch.nn.Sequential(model)

    with pytest.raises(LookupError, match=r"must keep the names.* gone: enter, .* and 1 more") as error:
        serve(step=loop(), convert=convert)
    assert "return the model itself" in error.value.fp8_next


@pytest.mark.parametrize("part", ["whole", "a block"])
def test_an_own_conversion_that_compiles_is_told_that_the_arm_does(part):
    def convert(model):
        import torch

        if part == "whole":
            model = torch.compile(model)
        else:
            model.blocks[0] = torch.compile(model.blocks[0])
        convert_but()(model)
        return model

    with pytest.raises(LookupError, match=r"convert\(\) gave a compiled model.* blocks\.0\.up") as error:
        serve(step=loop(), convert=convert)
    assert "return the plain model" in error.value.fp8_next
    assert "_orig_mod" in error.value.fp8_cause


def test_reentrant_checkpointing_of_the_whole_model_is_not_an_evaluation():
    def step(model, batch, optimizer, precision):
        import torch
        from torch.utils.checkpoint import checkpoint

        loss = checkpoint(model, batch.requires_grad_(), use_reentrant=True).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch[:16])
        return loss

    server = serve(step=step)
    decision = judge(server)
    assert server.logits(seed=0)
    assert decision.verdict is Verdict.PASS, decision.message
    assert decision.numbers["roles"]["fprop"] == {"expected": 5, "fp8": 5}
    assert decision.numbers["roles"]["recompute"]["fp8"] == decision.numbers["roles"]["recompute"]["expected"] > 0


def test_a_model_compiled_whole_is_compiled_once_and_its_evaluation_is_seen():
    import torch

    from pytest_fp8.worker.training.phases import follow
    from pytest_fp8.worker.watch.observe import Part

    traced, parts = [], []

    def count(graph, _):
        traced.append(graph)
        return graph.forward

    class Noted(Part):
        def inside(self, name):
            parts.append(name)
            return super().inside(name)

    model = build()
    model.compile(backend=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with follow(model, optimizer, Noted().inside):
            model(batch(0)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(batch(0))
    assert len(traced) == 2, "once with gradients and once without"
    assert parts.count("evaluation") == 4
    assert parts.count("backward") == 4
