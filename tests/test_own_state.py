"""What a step moves in a model besides its weights is put back, and the same optimizer makes the same updates."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.loops import CASE, ledgers, loop, serve
from pytest_fp8.questions.ledger.compare import compare

pytestmark = pytest.mark.slow
SEEDS = ((1, False), (1, True), (1, False), (2, False))


def counting():
    """A model whose step unfreezes its first layer after four steps, and says so in a buffer, a number and a flag."""
    import torch

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.number, self.frozen = 0, False

        def forward(self, x):
            return self.leave(self.enter(x))

    return Counting()


def unfreezing(model, batch, optimizer, precision):
    model.enter.requires_grad_(bool(model.seen >= 4))
    model.frozen = bool(model.seen < 4)
    loss = loop()(model, batch, optimizer, precision)
    model.seen = model.seen + 1
    model.number += 1
    return loss


def state(model):
    return int(model.seen), model.number, model.frozen, model.enter.weight.requires_grad, model.training


def remembering():
    """A model that keeps its last output for the next step: as a tensor, which is none at first; and one in place."""
    import torch

    class Remembering(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            self.hidden, self.mean = None, torch.zeros(32)

        def forward(self, x):
            hidden = self.enter(x if self.hidden is None else x + self.hidden)
            self.hidden = hidden.detach()
            self.mean += hidden.detach().float().mean(0).cpu()
            return self.leave(hidden)

    return Remembering()


def test_tensors_that_a_model_keeps_from_step_to_step_are_put_back():
    import torch

    engine = serve(build=remembering, step=loop()).engine
    first = engine.curve(seed=1, steps=4)["losses"]
    engine.curve(seed=0, steps=5)
    kept, content, mean = engine.model.hidden, engine.model.hidden.clone(), engine.model.mean.clone()
    with engine.standing_still():
        engine.step(engine.training_batch(0, 0))
        assert engine.model.hidden is not kept
    assert engine.model.hidden is kept
    assert torch.equal(engine.model.hidden, content)
    assert torch.equal(engine.model.mean, mean)
    assert engine.curve(seed=1, steps=4)["losses"] == first, "whatever was asked before"
    engine.restart(0)
    assert engine.model.hidden is None
    assert not engine.model.mean.any()


def test_a_schedule_in_the_step_stands_at_the_same_place_in_both_arms():
    fp8, reference = (serve(case, build=counting, step=unfreezing) for case in (CASE, CASE.reference()))
    fp8.engine.curve(seed=0, steps=6)
    assert compare(ledgers(fp8=fp8, reference=reference)) == []


def test_a_pass_that_moves_no_weight_leaves_the_model_as_it_was():
    engine = serve(build=counting, step=unfreezing).engine
    engine.curve(seed=0, steps=5)
    before = state(engine.model)
    with engine.standing_still():
        engine.step(engine.training_batch(0, 0))
        engine.model.eval()
    assert state(engine.model) == before == (5, 5, False, True, True)
    engine.restart(0)
    assert state(engine.model) == (0, 0, False, True, True)


def optimizers():
    import torch

    return {
        "adamw": torch.optim.AdamW,
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
    }


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_the_same_optimizer_makes_the_same_of_the_same_gradients(name):
    both = ledgers(step=loop(2, clip=0.1), optimizer=optimizers()[name])
    assert both.reference.updates == both.fp8.updates
    assert both.fp8.updates.steps == 3
    assert len(both.fp8.updates.digests) == 10


def test_the_innermost_module_owns_a_product_also_where_nothing_below_it_trains():
    def frozen():
        model = counting()
        model.enter.requires_grad_(False)
        return model

    assert compare(ledgers(build=frozen, step=loop())) == []


def test_restarts_from_one_seed_build_once_and_give_the_same_training():
    built = []

    def build():
        built.append(1)
        return counting()

    engine = serve(build=build, step=loop()).engine
    losses = [engine.curve(seed, steps=3, jitter=jitter)["losses"] for seed, jitter in SEEDS]
    built_for = len(built)
    assert engine.curve(2, steps=3)["losses"] == losses[-1]
    assert len(built) == built_for
    assert losses[0] == losses[2] != losses[1]
    assert engine.curve(1, steps=3, jitter=True)["losses"] == losses[1], "also where it is built anew"
