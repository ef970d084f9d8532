"""The observer of ``pytest-fp8 watch`` inside a training: what it finds, and that no fault of it harms the training."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os

import pytest
import torch
from torch.optim import optimizer as optimizers

from helpers.watching import OWN_FP8
from helpers.watching import start as start_watching
from pytest_fp8.codes import W
from pytest_fp8.watch import model as told_model
from pytest_fp8.watch import observer as watched
from pytest_fp8.watch.judge import judge
from pytest_fp8.worker.record import clock, trace

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts an observer in this process, which ends with the test."""
    at_exit: list = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setenv("FP8_WATCH_STEPS", "2")
    hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    held = [dict(each) for each in hooks]

    def begin():
        start_watching(str(tmp_path))
        return lambda: [end() for end in at_exit]

    yield begin
    for each, before in zip(hooks, held, strict=True):
        each.clear()
        each.update(before)


@pytest.fixture
def evidence(tmp_path):
    return lambda: json.loads((tmp_path / f"{os.getpid()}.json").read_text())


def small():
    """The small script's model, and its function that trains one."""
    names: dict = {}
    exec(OWN_FP8, names)
    return names["Model"]().bfloat16(), names["train"]


def losses():
    """What the training prints, and its last weights."""
    (model, train), printed = small(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(model, torch.optim.AdamW(model.parameters()))
    return printed.getvalue(), [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def alone():
    """:func:`losses` of a run that nobody watches."""
    return losses()


def backward(model, number):
    """The forward and backward pass of a batch."""
    ids = torch.randint(0, 48, (4, 24), generator=torch.Generator().manual_seed(number))
    torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten()).backward()


def same(one, other):
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def test_watched_and_unwatched_are_equal_to_the_bit(start, evidence, alone):
    start()
    assert same(losses(), alone)
    assert evidence()["state"] == "finished"
    assert judge(evidence()).verdict == "ON"


FAULTS = {
    "in the hook": (watched.Observer, "find_period"),
    "of the model": (told_model, "root_modules"),
    "of a clock": (clock, "between"),
    "in a profile": (trace, "plain_events"),
    "in writing": (watched.Observer, "write"),
    "at the end": (watched.Observer, "process_ends"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_observer_leaves_the_training_as_it_was(start, evidence, alone, monkeypatch, name):
    """All of it is called by one function, which ends the observation."""

    def fault(*given):
        raise ReferenceError("weakly-referenced object no longer exists")

    monkeypatch.setattr(*FAULTS[name], fault)
    end = start()
    assert same(losses(), alone)
    end()
    assert not torch._C._autograd._profiler_enabled()
    if name not in ("in writing", "at the end"):
        assert evidence()["state"] == "failed"
        assert "ReferenceError" in evidence()["reason"]
        assert judge(evidence()).why.code is W.NOT_OBSERVED


def test_gradients_of_several_passes_and_two_optimizers(start, evidence):
    """Muon beside AdamW: two optimizers are one step."""
    model, _ = small()
    blocks, rest = list(model.blocks.parameters()), [*model.embed.parameters(), *model.lm_head.parameters()]
    both = [torch.optim.SGD(blocks, lr=0.1), torch.optim.AdamW(rest)]
    start()
    for step in range(10):
        for part in range(3):
            backward(model, 3 * step + part)
        for each in both:
            each.step()
            each.zero_grad()
    training = judge(evidence())
    assert (training.verdict, training.evidence["optimizers_a_step"]) == ("ON", 2), training.why
    assert training.window is not None
    assert training.found is not None
    assert (training.window.backward_passes, training.found.rows) == (3, 96)
    assert len(training.found.classes[0].products["fprop"]) == 6


def test_calls_without_a_forward_pass_between_them_are_one_step(start, evidence):
    """ZeRO steps its inner optimizer once for each group of parameters."""
    model, train = small()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = optimizer.step

    class Engine:
        def step(self):
            plain()
            plain()

        zero_grad = optimizer.zero_grad

    start()
    train(model, Engine())
    training = judge(evidence())
    assert (training.verdict, training.evidence["optimizers_a_step"], training.evidence["steps"]) == ("ON", 1, 6)


def test_a_script_that_hides_its_objects_from_gc(start, evidence):
    """nanochat freezes gc after its first step, and has an fp8.py of its own."""
    model, train = small()
    optimizer = torch.optim.AdamW(model.parameters())
    start()
    try:
        train(model, optimizer, steps=1)
        gc.freeze()
        train(model, optimizer, steps=7)
    finally:
        gc.unfreeze()
    training = judge(evidence())
    assert training.verdict == "ON", training.why
    assert [len(each.layers) for each in training.found.classes] == [2, 2, 1]


def test_an_optimizer_in_the_backward_pass_has_steps_and_no_profile(start, evidence):
    model, _ = small()
    each = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def stepped(parameter):
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped)
    start()
    for step in range(10):
        backward(model, step)
    training = judge(evidence())
    assert (training.verdict, training.why.code) == ("UNKNOWN", W.NO_STEPS)
    assert training.evidence["optimizers_a_step"] == len(each)
    assert len(training.evidence["steps_ms"]) == 2


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize("compiled_step", [False, True])
def test_a_compiled_training_has_no_graph_more(start, tmp_path, evidence, compiled_step):
    """A compiled step of an optimizer is not seen: to look into it would break its graph."""
    from torch._dynamo.utils import counters

    def graphs():
        torch._dynamo.reset()
        counters.clear()
        model, _ = small()
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step, backend="eager") if compiled_step else optimizer.step
        compiled = torch.compile(model, backend="eager")
        for number in range(9):
            backward(compiled, number)
            step()
            optimizer.zero_grad()
        breaks, recompiles = (sum(counters[name].values()) for name in ("graph_break", "recompiles"))
        return counters["stats"]["unique_graphs"], breaks, recompiles

    alone = graphs()
    start()
    assert graphs() == alone
    if compiled_step:
        assert list(tmp_path.iterdir()) == []
    else:
        assert judge(evidence()).verdict == "ON", evidence()["reason"]
