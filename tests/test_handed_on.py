"""What an optimizer is given of weight gradients: the decision on made-up numbers, and what live arms note."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.arms import spec, square
from pytest_fp8.codes import N
from pytest_fp8.questions.numerics.evidence import HandedOn
from pytest_fp8.questions.numerics.gradients import find_in_handed_on

LAYERS = ("a", "b", "c", "d")


def arm(cosines=(1.0,) * 4, factors=(1.0,) * 4, layers=LAYERS, lengths=None):
    lengths = lengths or (1.0,) * len(layers)
    return [HandedOn(*each) for each in zip(layers, cosines, factors, lengths, strict=True)]


def found(fp8, bf16=None, later=None):
    bf16 = arm() if bf16 is None else bf16
    one = SimpleNamespace(handed_on=fp8, handed_on_later=arm() if later is None else later)
    return find_in_handed_on(SimpleNamespace(fp8=one, bf16=SimpleNamespace(handed_on=bf16, handed_on_later=arm())))


@pytest.mark.parametrize(
    ("fp8", "bf16"),
    [
        (arm(), arm()),
        (arm(cosines=(0.9994,) * 4, factors=(1.0, 1.0015, 0.9985, 1.0)), arm()),
        # Both arms clip, each by its own norm.
        (arm(factors=(0.31,) * 4), arm(factors=(0.35,) * 4)),
        (arm(factors=(0.31,) * 4), arm()),
        # Each layer is clipped by its own norm: FP8 moves these.
        (arm(factors=(0.3, 0.5, 0.8, 1.0)), arm(factors=(0.33, 0.52, 0.75, 1.0))),
        # One layer's norm is above its limit in FP8 alone.
        (arm(factors=(1.0, 0.96, 1.0, 1.0), lengths=(1.0, 1.05, 1.0, 0.97)), arm()),
        # A penalty, a projection, noise: BF16's optimizer is given something else as well.
        (arm(cosines=(0.5, 1.0, 1.0, 1.0)), arm(cosines=(0.6, 1.0, 1.0, 1.0))),
        # Too few layers to tell one factor from that of all.
        (arm((1.0, 1.0), (0.9, 1.0), "ab"), arm((1.0, 1.0), (1.0, 1.0), "ab")),
        # One arm steps twice.
        (arm() + arm(cosines=(0.1,) * 4), arm()),
        ([], arm()),
        (arm(), []),
    ],
)
def test_sound_arms_are_not_failed(fp8, bf16):
    assert found(fp8, bf16) is None


@pytest.mark.parametrize(
    ("fp8", "later", "code", "seen"),
    [
        ({"factors": (0.31, 0.31, 0.279, 0.31)}, {}, N.GRADIENT_SCALED, "c: times 0.279, of the other layers 0.310"),
        ({"factors": (1.0, 1.0, 1.0, float("nan"))}, {}, N.GRADIENT_SCALED, "d: times nan"),
        ({}, {"cosines": (1.0, 0.5, 1.0, 1.0)}, N.GRADIENT_REPLACED, "b: cosine 0.500"),
        ({}, {"cosines": (1.0, -1.0, 1.0, 1.0)}, N.GRADIENT_REPLACED, "b: cosine -1.000"),
        ({}, {"cosines": (1.0, float("nan"), 1.0, 1.0)}, N.GRADIENT_REPLACED, "b: cosine nan"),
    ],
)
def test_a_layer_whose_gradient_is_scaled_or_another_is_named(fp8, later, code, seen):
    finding = found(arm(**fp8), arm(factors=(0.35,) * 4), arm(**later))
    assert finding.code is code
    assert finding.seen.startswith(seen)
    assert finding.headline.endswith("after 13 training steps") == bool(later)


def serve(**given):
    from pytest_fp8.worker.server import ArmServer

    return ArmServer(spec(**given))


def clipped(model, batch, optimizer, precision):
    import torch

    for half in torch.cat([batch, batch.sin()]).chunk(2):
        with precision():
            loss = square(model, half)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def closed(model, batch, optimizer, precision):
    def closure():
        optimizer.zero_grad()
        with precision():
            loss = square(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"loss": None, "step": clipped}], ids=["loss", "clipped"])
def test_an_arm_notes_what_its_optimizer_is_given(given):
    server = serve(**given)
    noted = server.numerics(moved=False)
    for key in ("handed_on", "handed_on_later"):
        assert [each["layer"] for each in noted[key]] == ["2", "0"]
        assert all(each["cosine"] > 0.999 for each in noted[key])
        first, second = (each["factor"] for each in noted[key])
        assert first == pytest.approx(second, rel=0.01), "one factor for all layers"
        assert first < 0.5 if given else abs(first - 1) < 0.01
    assert "step" not in vars(server.engine.optimizer), "nothing is left of the watch"


@pytest.mark.slow
def test_a_step_with_a_closure_notes_nothing():
    import torch

    server = serve(optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=2), loss=None, step=closed)
    noted = server.numerics(moved=False)
    assert noted["handed_on"] == noted["handed_on_later"] == []
    assert noted["products"]
