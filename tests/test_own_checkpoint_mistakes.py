"""A user's own save() and load() with a mistake, in live arms on a CPU: each is named with what to do."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.carried import carried, from_model, loss, through, with_model
from helpers.loops import batch, build
from pytest_fp8 import Verdict, Workload
from pytest_fp8.errors import SettingsError
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow


def nothing(model, optimizer, folder):
    """Loads nothing."""


def prefixed(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict({f"module.{name}": value for name, value in weights.items()}, strict=False)
    optimizer.load_state_dict(state)


def halved_in_place(model, optimizer, folder):
    with_model(model, optimizer, folder)
    model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data / 3)


def rate_lost(model, optimizer, folder):
    import torch

    weights, state = torch.load(folder / "x.pt", weights_only=True)
    model.load_state_dict(weights)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = 3 * rate


@pytest.mark.parametrize(
    ("save", "load", "says"),
    [
        (with_model, nothing, "load() loaded nothing"),
        (with_model, prefixed, "dropped by strict=False"),
        (halved_in_place, from_model, "saving changed the model itself"),
        (with_model, rate_lost, "group 0: lr 0.001 -> 0.003"),
    ],
)
def test_mistakes_are_named(save, load, says):
    decision = carried(loss=loss, save=save, load=load)
    assert decision.verdict is Verdict.FAIL, decision.message
    assert says in decision.message


def raising(model, optimizer, folder):
    raise KeyError("blocks.0.up.weight")


def pickling(model, optimizer, folder):
    import torch

    class Config:
        pass

    # As one that stands in a test file, and that an arm was given.
    Config.__qualname__ = "Config"
    torch.save({"config": Config()}, folder / "x.pt")


def assigning(model, optimizer, folder):
    import torch

    model.load_state_dict(torch.load(folder / "x.pt", weights_only=True)[0], assign=True)


@pytest.mark.parametrize(
    ("save", "load", "says"),
    [
        (raising, from_model, r"the workload's save, raising\(\), raised KeyError: 'blocks.0.up.weight'"),
        (with_model, raising, r"the workload's load, raising\(\), raised KeyError"),
    ],
)
def test_functions_that_cannot_work_are_one_error_that_names_them(save, load, says):
    with pytest.raises(WorkloadError, match=says) as error:
        carried(loss=loss, save=save, load=load)
    assert error.value.fp8_next


def test_a_known_error_in_them_has_its_own_cause():
    with pytest.raises(WorkloadError, match=r"the workload's save, pickling\(\), raised \w+") as error:
        carried(loss=loss, save=pickling, load=from_model)
    assert "without importing it" in error.value.fp8_cause
    assert "asdict" in error.value.fp8_next


def test_new_parameters_that_no_optimizer_holds_are_a_verdict():
    decision = carried(loss=loss, save=with_model, load=assigning)
    assert decision.verdict is Verdict.FAIL
    assert "the optimizer steps parameters that the model does not have" in decision.message
    assert "assign=True" in decision.message


def test_one_function_alone_is_refused():
    with pytest.raises(SettingsError, match="both save= and load="):
        Workload(build=build, batch=batch, save=with_model).ship("a test")


def test_own_functions_that_are_asked_for_and_not_given_are_named():
    with pytest.raises(WorkloadError, match="the workload has no save"):
        carried(through("own"), loss=loss)
