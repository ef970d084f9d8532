"""A user's own save() and load(), in live arms on a CPU: mistakes are named with what to do. The controls of
``suites/controls/checkpoints.py`` have more of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")

from helpers.carried import carried, from_model, loss, through, with_model
from helpers.loops import batch, build
from pytest_fp8 import Verdict, Workload
from pytest_fp8.codes import K
from pytest_fp8.errors import SettingsError
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow


def halved_in_place(model, optimizer, folder):
    with_model(model, optimizer, folder)
    model.blocks[0].up.weight.data.copy_(model.blocks[0].up.weight.data / 3)


def rate_lost(model, optimizer, folder):
    rate = optimizer.param_groups[0]["lr"]
    from_model(model, optimizer, folder)
    optimizer.param_groups[0]["lr"] = 3 * rate


def assigning(model, optimizer, folder):
    import torch

    model.load_state_dict(torch.load(folder / "x.pt", weights_only=True)[0], assign=True)


@pytest.mark.parametrize(
    ("save", "load", "code"),
    [
        (halved_in_place, from_model, K.CHANGED_BY_SAVING),
        (with_model, rate_lost, K.GROUPS_LOST),
        (with_model, assigning, K.STRAY_PARAMETERS),
    ],
)
def test_mistakes_are_named(save, load, code):
    decision = carried(loss=loss, save=save, load=load)
    assert (decision.verdict, decision.code) == (Verdict.FAIL, code), decision.message


def raising(model, optimizer, folder):
    raise KeyError("blocks.0.up.weight")


def pickling(model, optimizer, folder):
    import torch

    class Config:
        pass

    # As one that stands in a test file, and that an arm was given.
    Config.__qualname__ = "Config"
    torch.save({"config": Config()}, folder / "x.pt")


@pytest.mark.parametrize(
    ("save", "load", "says", "cause"),
    [
        (raising, from_model, r"the workload's save, raising\(\), raised KeyError: 'blocks.0.up.weight'", ""),
        (with_model, raising, r"the workload's load, raising\(\), raised KeyError", ""),
        (pickling, from_model, r"the workload's save, pickling\(\), raised \w+", "without importing it"),
    ],
)
def test_functions_that_cannot_work_are_one_error_that_names_them(save, load, says, cause):
    with pytest.raises(WorkloadError, match=says) as error:
        carried(loss=loss, save=save, load=load)
    assert error.value.fp8_next
    assert cause in error.value.fp8_cause


def test_functions_that_are_not_given():
    with pytest.raises(SettingsError, match="both save= and load="):
        Workload(build=build, batch=batch, save=with_model).ship("a test")
    with pytest.raises(WorkloadError, match="the workload has no save"):
        carried(through("own"), loss=loss)
