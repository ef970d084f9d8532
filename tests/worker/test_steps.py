"""Steps of users in live arms: what each curve does anew, and that to ask an arm changes nothing of what it answers."""

from __future__ import annotations

import copy
import gc
import os
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torchao")

import torch
from torch import nn

from helpers.arms import make_model
from helpers.nets import CASE, batch, build, by_torchao, closing, lbfgs, loop, net, sam, serve, squares
from pytest_fp8 import Case
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.plain import of_text, to_plain
from pytest_fp8.worker.record import clock
from pytest_fp8.worker.server import ArmServer
from pytest_fp8.worker.state.snapshot import unchanged
from pytest_fp8.worker.training.preparation import prefer_fast_attention
from pytest_fp8.worker.training.step import follow

pytestmark = pytest.mark.slow


# -- what a step is ---------------------------------------------------------------------------------------------------


class Clock:
    """The test's own time, in milliseconds."""

    now = 0.0


@pytest.mark.parametrize(("every", "evaluated"), [(None, 0.0), (3, 40.0), (10, 1000.0)])
def test_an_evaluation_every_so_many_steps_is_not_timed(monkeypatch, every, evaluated):
    """A step takes 10 ms, an evaluation ``evaluated`` ms; once, the blocks with an evaluation in them took longer."""
    monkeypatch.setattr(clock, "mark", lambda: Clock.now)
    monkeypatch.setattr(clock, "between", lambda one, two: two - one)
    steps = iter(range(1000))

    def takes(model, x):
        Clock.now += 10.0 if torch.is_grad_enabled() else evaluated
        return model.only(x)

    def step(model, batch, optimizer, precision):
        return loop(evaluate=bool(every) and next(steps) % every == 0)(model, batch, optimizer, precision)

    # Without a conversion, which would make FP8's forward of the model another class's.
    server = serve(replace(CASE, backend="bf16", recipe="none"), build=lambda: net(takes, only=(32, 32)), step=step)
    # More steps are dropped than there are batches.
    assert server.blocks(count=4, steps=3, dropped=9)["milliseconds"] == [10.0] * 4


def test_a_model_compiled_whole_is_compiled_once_and_its_evaluation_is_seen():
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
    assert (parts.count("evaluation"), parts.count("backward")) == (4, 4)


def test_a_step_that_calls_its_closure_often_or_that_of_its_base_class_is_one():
    """How often LBFGS calls its closure depends on the losses, and differs between the arms."""
    course = serve(optimizer=lbfgs, step=closing()).curve(seed=0, steps=3)["course"]
    assert course["stepped"] == [1, 1, 1]

    class Twice(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    weight, seen = nn.Parameter(torch.ones(2)), []
    torch.optim.AdamW([weight])  # whose class has hooks from then on
    optimizer = Twice([weight])
    with follow(nn.Linear(1, 1), optimizer, lambda name: nullcontext(), lambda: seen.append("step")) as counts:
        weight.grad = torch.ones(2)
        optimizer.step()
    assert (seen, counts.stepped) == (["step"], 1)


def test_a_step_that_raises_leaves_nothing_patched():
    before = torch.autograd.backward, torch.autograd.grad

    def step(model, batch, optimizer, precision):
        model(batch)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        serve(step=step)
    assert (torch.autograd.backward, torch.autograd.grad) == before


# -- optimizers and schedules -----------------------------------------------------------------------------------------


def warming(parameters):
    """A learning rate that starts at zero: without a step of the schedule nothing is trained."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    return optimizer


def scheduled_step(model, batch, optimizer, precision):
    loss = loop(2)(model, batch, optimizer, precision)
    optimizer.scheduler.step()
    return loss


class InBackward(torch.optim.Optimizer):
    """An optimizer for each weight, which steps as soon as its gradient is there."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {})
        self.each = {}
        for parameter in self.param_groups[0]["params"]:
            self.each[parameter] = torch.optim.Adam([parameter], lr=1e-2)
            parameter.register_post_accumulate_grad_hook(self.now)

    def now(self, parameter):
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def step(self, closure=None): ...


def second_beside(parameters):
    parameters = list(parameters)
    main = torch.optim.Adam(parameters[2:], lr=1e-3)
    main.second = torch.optim.Adam(parameters[:2], lr=1e-2)
    return main


def both_step(model, batch, optimizer, precision):
    with precision():
        loss = squares(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.second.step()
    model.zero_grad()
    return loss.detach()


def test_a_schedule_is_stepped_without_an_own_step():
    losses = serve(batch=lambda step: batch(0), optimizer=warming).curve(0, 8)["losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_a_schedule_restarts_with_each_curve_and_resumes_from_a_checkpoint(tmp_path):
    one, two = (serve(step=scheduled_step, optimizer=warming) for _ in range(2))
    first = one.curve(seed=1, steps=4)
    assert one.curve(seed=1, steps=4) == first
    one.save(str(tmp_path), "dcp", optimizer=True)
    goes_on = one.resume(seed=1, first_step=4, steps=4)
    two.curve(seed=2, steps=1)
    two.load(str(tmp_path), "dcp", optimizer=True, seed=2)
    assert two.resume(seed=1, first_step=4, steps=4)["losses"] == goes_on["losses"]


@pytest.mark.parametrize("optimizer", [lbfgs, sam])
def test_calibration_and_observation_change_no_weight(optimizer):
    engine = (server := serve(step=closing(), optimizer=optimizer)).engine
    server.curve(seed=0, steps=2)
    weights = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    entries = [sorted(state) for state in engine.optimizer.state.values()]
    opened, plain = [], engine.precision
    engine.precision = lambda: opened.append(1) or plain()
    engine.calibration_passes = 2
    engine.renew_scales()
    assert len(opened) >= 2
    server.logits(seed=0)
    assert all(weights[name].equal(value) for name, value in engine.model.named_parameters())
    assert entries == [sorted(state) for state in engine.optimizer.state.values()]


@pytest.mark.parametrize(
    "parts", [{"optimizer": second_beside, "step": both_step}, {"optimizer": InBackward}], ids=["two", "in backward"]
)
def test_what_moves_weights_past_the_optimizer_moves_none_while_an_arm_is_watched(parts):
    server = serve(build=make_model, **parts)
    engine = server.engine
    engine.calibration_passes = 2
    first = server.curve(seed=0, steps=4)["losses"]
    found = [server.numerics(moved=True) for _ in range(2)]
    assert set(found[0]["gradients"]["sketches"]) == {name for name, _ in engine.model.named_parameters()}
    assert found[0]["gradients"]["sketches"] == found[1]["gradients"]["sketches"]
    assert found[0]["moved"]["sketches"] == found[1]["moved"]["sketches"]
    engine.restart(0)
    before = [p.detach().clone() for p in engine.model.parameters()]
    with unchanged(engine):
        engine.step(engine.training_batch(0, 0))
    assert all(map(torch.equal, before, engine.model.parameters()))
    assert server.curve(seed=0, steps=4)["losses"] == first
    if parts["optimizer"] is InBackward:
        for parameter in engine.model.parameters():
            assert list(parameter._post_accumulate_grad_hooks.values()) == [engine.optimizer.now]


# -- what watching leaves behind --------------------------------------------------------------------------------------


def test_a_watched_step_leaves_nothing_behind():
    def values():
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)

    server = serve()
    server.numerics(moved=False)
    before = values()
    server.numerics(moved=False)
    assert values() - before < 1000, "operands, samples and weights are gone"


def test_what_a_user_s_hook_makes_of_a_gradient_is_seen():
    def emptied(parameter):
        parameter.grad.zero_()

    convert = by_torchao(then=lambda model: model.enter.bias.register_post_accumulate_grad_hook(emptied))
    found = serve(convert=convert).numerics(moved=False)["gradients"]
    assert [name for name, text in found["sketches"].items() if not any(of_text(text))] == ["enter.bias"]


def averaging():
    """A momentum encoder: the forward pass puts another tensor in each weight's place."""

    def forward(model, x):
        with torch.no_grad():
            for old, new in zip(model.slow.parameters(), model.online.parameters(), strict=True):
                old.data = 0.9 * old.data + 0.1 * new.data
            kept = model.slow(x)
        return model.online(x) + 0 * kept

    online = make_model()
    return net(forward, online=online, slow=copy.deepcopy(online).requires_grad_(False))


def test_what_a_checkpoint_holds_is_in_the_model_however_it_keeps_its_weights(tmp_path):
    server = serve(build=averaging)
    server.curve(seed=0, steps=3)
    saved = {name: p.detach().clone() for name, p in server.engine.model.named_parameters()}
    server.save(str(tmp_path / "one"), "safetensors", optimizer=False)
    server.curve(seed=1, steps=3)
    assert not server.load(str(tmp_path / "one"), "safetensors", optimizer=False, seed=1)["refused"]
    assert [name for name, p in server.engine.model.named_parameters() if not torch.equal(p, saved[name])] == []


def test_a_restart_takes_back_the_buffers_that_convert_made():
    def scaled(model, x):
        model.amax.copy_(torch.maximum(model.amax, x.detach().abs().max().float()))
        return model.inner(x)

    def scale(model):
        model[1] = net(scaled, inner=model[1])
        model[1].register_buffer("amax", torch.zeros(()))

    engine = serve(build=lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()), convert=by_torchao(then=scale)).engine
    engine.step(engine.training_batch(0, 0))
    assert engine.model[1].amax > 0
    engine.restart(0)
    assert engine.model[1].amax == 0


ONE_MODEL = 2 * (32 * 32 + 32)
"""Bytes of its parameters in bfloat16."""


@pytest.mark.parametrize(
    ("models", "builds"), [(9, [0, 1, 2]), (2, [0, 1, 2, 1, 2]), (1, [0, 1, 2, 0, 1, 2]), (0, [0, 0, 1, 2, 0, 1, 2])]
)
def test_a_model_is_built_once_for_a_seed_where_the_host_has_memory_for_those_of_all(monkeypatch, models, builds):
    def free(name, own=os.sysconf):
        left = ONE_MODEL * (8 * (models + 0.5) - len(engine.setup._kept))
        return {"SC_AVPHYS_PAGES": left, "SC_PAGE_SIZE": 1}.get(name) or own(name)

    built, values = [], []
    engine = serve(build=lambda: nn.Sequential(nn.Linear(32, 32))).engine
    builds_one = engine.setup.fresh_model
    monkeypatch.setattr(engine.setup, "fresh_model", lambda seed: [built.append(seed), builds_one(seed)][1])
    engine.restart(0)
    assert not built, "the arm's own model was of this seed"
    monkeypatch.setattr(os, "sysconf", free)
    engine.setup._kept.clear()
    for seed in (0, 0, 1, 2, 0, 1, 2):
        engine.restart(seed)
        values.append(engine.model[0].weight.detach().clone())
    assert built == builds
    assert all(values[0].equal(values[at]) for at in (1, 4))
    assert all(values[at].equal(values[at + 3]) for at in (2, 3))


OPERATIONS = {
    "layers": lambda server: server.layers(),
    "ledger": lambda server: server.ledger(),
    "numerics": lambda server: server.numerics(moved=True),
    "moved gradients": lambda server: server.moved("gradients", draws=1, operands=1),
    "curve": lambda server: server.curve(seed=0, steps=4, watch=True),
    "a curve with noise": lambda server: server.curve(seed=0, steps=4, noise=1),
    "logits": lambda server: [server.restart(7), server.logits(7).hex(), server.moved("outputs", draws=1, seed=7)],
}


class KeepsState(nn.Module):
    """Moves all that a training step can move beside weights, and sends some rows through a second layer."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.drop = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)
        self.down, self.gate = nn.Linear(64, 32), nn.Linear(32, 16)
        self.register_buffer("average", torch.zeros(64))
        self.calls, self.history, self.seen = 0, [], None
        self.python, self.numpy, self.own = random.Random(5), np.random.default_rng(5), torch.Generator()

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        self.seen = 1.0 if self.seen is None else 0.9 * self.seen
        noise = self.python.random() + self.numpy.random() + float(torch.rand((), generator=self.own)) + self.seen
        hidden = self.drop(self.norm(self.up(x)).relu()) * (1 + len(self.history) % 3 + noise)
        with torch.no_grad():
            self.average.lerp_(hidden.detach().mean(0), 0.1)
        chosen = self.gate(x).softmax(-1).argmax(-1) % 2 == 0
        return torch.where(chosen[:, None], self.down(hidden), x) + self.average.mean()


def counting_step(model, batch, optimizer, precision):
    """Counts its calls on the optimizer, freezes a layer in the fourth, and steps a schedule by itself."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1
    if optimizer.calls == 4:
        model.norm.eval()
    with precision():
        loss = squares(model, batch) * optimizer.calls**0.1
    loss.backward()
    optimizer.step()
    optimizer.scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def of_the_suite():
    case = Case("micro", "torchao", "tensorwise", lora=8, emulated=True)
    return ArmServer(ArmSpec(case, "cpu", threads=1))


def own():
    return serve(build=KeepsState, step=counting_step, optimizer=warming)


@pytest.mark.parametrize("made", [of_the_suite, own], ids=["micro", "own"])
def test_answers_are_equal_in_any_order(made):
    def answers(draw):
        server = made()
        order = random.Random(draw).sample(list(OPERATIONS), len(OPERATIONS))
        return {name: to_plain(OPERATIONS[name](server)) for name in order}

    first, other = map(answers, range(2))
    assert [name for name in OPERATIONS if repr(first[name]) != repr(other[name])] == []


# -- switches of torch ------------------------------------------------------------------------------------------------


def test_attention_kernels_that_the_user_switched_off_stay_off():
    switches = torch.backends.cuda

    def enabled():
        return switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled(), switches.math_sdp_enabled()

    before = enabled()
    switches.enable_cudnn_sdp(False)
    switches.enable_flash_sdp(False)
    try:
        with prefer_fast_attention(torch.device("cuda")):
            assert enabled() == (False, False, True)
        assert enabled() == (False, False, True)
    finally:
        switches.enable_cudnn_sdp(before[0])
        switches.enable_flash_sdp(before[1])
