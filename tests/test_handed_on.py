"""What an optimizer is given of weight gradients: the decision on made-up numbers, and what live arms note."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from helpers.arms import spec
from pytest_fp8.codes import N
from pytest_fp8.questions.numerics.evidence import HandedOn
from pytest_fp8.questions.numerics.handed_on import find_in_handed_on

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


def test_a_layer_that_something_scales_is_named_with_its_factor():
    finding = found(arm(factors=(0.31, 0.31, 0.279, 0.31)), arm(factors=(0.35,) * 4))
    assert finding.code is N.GRADIENT_SCALED
    assert finding.seen == "c: times 0.279, of the other layers 0.310"


@pytest.mark.parametrize("cosine", [0.5, -1.0, 0.0, float("nan")])
def test_another_gradient_in_a_layer_s_place_is_named(cosine):
    finding = found(arm(), later=arm(cosines=(1.0, cosine, 1.0, 1.0)))
    assert finding.code is N.GRADIENT_REPLACED
    assert finding.headline.endswith("after 13 training steps")
    assert finding.seen.startswith(f"b: cosine {cosine:.3f}")


def test_a_factor_that_is_no_number_is_no_factor():
    assert found(arm(factors=(1.0, 1.0, 1.0, float("nan")))).seen.startswith("d: times nan")


@pytest.mark.slow
def test_an_arm_notes_what_its_optimizer_is_given():
    from pytest_fp8.worker.server import ArmServer

    def build():
        import torch

        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def step(model, batch, optimizer, precision):
        import torch

        for half in batch.chunk(2):
            with precision():
                loss = (model(half) - half).float().square().mean()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(step):
        import torch

        return torch.randn(32, 32)

    plain, own = ArmServer(spec()), ArmServer(spec(build=build, batch=batch, loss=None, step=step))
    noted = plain.numerics(moved=False)
    for key in ("handed_on", "handed_on_later"):
        assert [each["layer"] for each in noted[key]] == ["2", "0"]
        assert all(each["cosine"] > 0.999 and abs(each["factor"] - 1) < 0.01 for each in noted[key])
    noted = own.numerics(moved=False)
    for key in ("handed_on", "handed_on_later"):
        assert all(each["cosine"] > 0.999 for each in noted[key])
        first, second = (each["factor"] for each in noted[key])
        assert first == pytest.approx(second, rel=0.01), "one factor for all layers"
        assert first < 0.5, "clipped"
    for server in (plain, own):
        assert server.engine.optimizer.step.__name__ == "step"
        assert "step" not in vars(server.engine.optimizer), "nothing is left of the watch"


@pytest.mark.slow
def test_a_step_with_a_closure_notes_nothing():
    import torch

    from pytest_fp8.worker.server import ArmServer

    server = ArmServer(
        spec(optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=2), loss=None, step=closed)
    )
    noted = server.numerics(moved=False)
    assert noted["handed_on"] == noted["handed_on_later"] == []
    assert noted["products"]


def closed(model, batch, optimizer, precision):
    def closure():
        optimizer.zero_grad()
        with precision():
            loss = (model(batch) - batch).float().square().mean()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()
