"""Hand-written steps in live arms, on a CPU: which of their parts are training, and what each curve does anew."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("torchao")

from helpers.loops import CASE, batch, build, judge, loop, serve
from pytest_fp8 import Verdict

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_each_micro_batch_is_accounted_for(parts):
    decision = judge(serve(step=loop(parts, clip=1.0)))
    assert decision.verdict is Verdict.PASS, decision.message
    owed = {"fprop": 5 * parts, "dgrad": 4 * parts, "wgrad": 5 * parts}
    assert decision.numbers["roles"] == {role: {"expected": n, "fp8": n} for role, n in owed.items()}
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
    first = one.curve(seed=1, steps=4)
    assert one.curve(seed=1, steps=4) == first
    one.save(str(tmp_path), "dcp", optimizer=True)
    goes_on = one.resume(seed=1, first_step=4, steps=4)
    two.curve(seed=2, steps=1)
    two.load(str(tmp_path), "dcp", optimizer=True, seed=2)
    assert two.resume(seed=1, first_step=4, steps=4)["losses"] == goes_on["losses"]


def test_a_step_may_skip_losses_that_are_not_finite():
    healthy = loop()

    def step(model, batch, optimizer, precision):
        if float(batch.sum()) > 0:
            return batch.new_tensor(float("nan"))
        return healthy(model, batch, optimizer, precision)

    curve = serve(step=step).curve(seed=0, steps=8)
    assert len(curve["gradient_norms"]) == len(curve["losses"]) == 8
    assert any(math.isnan(loss) for loss in curve["losses"])


def test_calibration_passes_of_a_step_change_no_weight(monkeypatch):
    server = serve(step=scheduled_step, optimizer=scheduled)
    opened = []
    server.engine.restart(seed=0)
    weights = {name: value.clone() for name, value in server.engine.model.named_parameters()}
    plain = server.engine.precision
    server.engine.precision = lambda: opened.append(1) or plain()
    server.engine.calibration_passes = 2
    server.engine.restart(seed=0)
    assert len(opened) == 4
    assert all(weights[name].equal(value) for name, value in server.engine.model.named_parameters())
    assert server.engine.optimizer.scheduler.last_epoch == 0


def test_a_model_compiled_whole_is_compiled_once_and_its_evaluation_is_seen():
    import torch

    from pytest_fp8.worker.training.step import follow

    traced, parts = [], []

    def count(graph, _):
        traced.append(graph)
        return graph.forward

    @contextmanager
    def noted(name):
        parts.append(name)
        yield

    model = build()
    model.compile(backend=count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with follow(model, optimizer, noted):
            model(batch(0)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(batch(0))
    assert len(traced) == 2, "once with gradients and once without"
    assert parts.count("evaluation") == 4
    assert parts.count("backward") == 4
