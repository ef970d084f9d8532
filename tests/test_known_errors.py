"""Errors that a user's code raises in an arm, and what is said of where they come from."""

from __future__ import annotations

import dataclasses
import operator
import pickle

import pytest

pytest.importorskip("torchao")

import torch

from helpers.loops import serve
from pytest_fp8.codes import R
from pytest_fp8.worker.error_trace import known_cause
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

NOTHING = (R.ARM_RAISED, "", "")


def raised(make, *given):
    """What is said of the error that a library raises."""
    try:
        make(*given)
    except Exception as error:
        return known_cause(error)
    pytest.fail("no error")


def weight():
    return [torch.nn.Parameter(torch.ones(1))]


def classes_as_floats():
    torch.nn.functional.cross_entropy(torch.randn(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))


def without_bfloat16(name):
    operator.attrgetter(name)(torch)(torch.eye(4, dtype=torch.bfloat16))


def short_schedule():
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    for _ in range(5):
        optimizer.step()
        schedule.step()


def second_derivative():
    def penalised(model, x):
        given = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(given).float().sum(), given, create_graph=True)
        return gradient.float().square().mean()

    serve(loss=penalised)


def squares(model, x):
    return model(x).float().square().mean()


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32, bias=False)

    def forward(self, x):
        y = self.layer(x.unflatten(0, (-1, 16)))
        y *= 2
        return y


def pickled(module):
    class Pickler:
        """Named as what the module has under this name, or has not."""

    Pickler.__module__, Pickler.__qualname__ = module, "Pickler"
    pickle.dumps(Pickler())


def half_an_optimizer():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups

    Wrapper(torch.optim.SGD(weight(), lr=0.1)).register_step_pre_hook(print)


def no_rows(recipe):
    """In the forward pass with one scale of the whole input, in the backward pass with one of each row."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)), config=config)
    model(torch.randn(16, 32)[:0]).sum().backward()


@pytest.mark.parametrize(
    ("make", "given", "code", "says"),
    [
        (classes_as_floats, (), R.CLASSES_AS_FLOATS, "y.long()"),
        (without_bfloat16, ("fft.rfft",), R.NO_BF16_OPERATOR, "x.float()"),
        (without_bfloat16, ("linalg.svd",), R.NO_BF16_OPERATOR, "x.float()"),
        (short_schedule, (), R.SCHEDULE_ENDS, "steps"),
        (second_derivative, (), R.SECOND_DERIVATIVE, "leave="),
        (lambda: serve(build=Scaled, loss=squares), (), R.CHANGED_IN_PLACE, "leave="),
        (pickled, ("no_such_module",), R.CANNOT_PICKLE, "dataclasses.asdict(config)"),
        (pickled, ("test_known_errors",), R.CANNOT_PICKLE, "dataclasses.asdict(config)"),
        (half_an_optimizer, (), R.BAD_OPTIMIZER, "self.optimizer"),
        (lambda: torch.optim.LBFGS(weight()).step(), (), R.NEEDS_CLOSURE, "Workload(step="),
        (torch.nn.Linear(4, 4), (None,), R.NO_TENSOR, "batch(step)"),
        (torch.nn.Embedding(4, 4), (3,), R.NO_TENSOR, "batch(step)"),
        (no_rows, ("tensorwise",), R.NO_ROWS, "pad_to_multiple(rows)"),
        (no_rows, ("rowwise",), R.NO_ROWS, "pad_to_multiple(rows)"),
    ],
)
def test_an_error_of_a_library_says_what_to_do(make, given, code, says):
    found, _, next_step = raised(make, *given)
    assert found is code
    assert says in next_step


def test_batch_norms_of_all_ranks_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert raised(torch.nn.SyncBatchNorm(4), torch.ones(2, 4))[0] is R.NEEDS_NCCL


class Adapted(torch.nn.Linear):
    def __init__(self):
        super().__init__(32, 32)
        self.requires_grad_(False)
        self.more = torch.nn.Parameter(torch.zeros(32, 32))

    def forward(self, x):
        return super().forward(x) + torch.nn.functional.linear(x, self.more)


def test_a_conversion_that_takes_all_that_is_trained():
    with pytest.raises(WorkloadError) as failure:
        serve(build=lambda: torch.nn.Sequential(Adapted(), torch.nn.GELU(), Adapted()), loss=squares)
    assert failure.value.fp8_code is R.NOTHING_TRAINABLE


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.isnan(0.5),
        lambda: torch.nn.functional.cross_entropy(torch.randn(2, 2), 5),
        lambda: torch.nn.Linear(32, 32)(torch.randn(0, 48)),
        lambda: torch.nn.Linear(32, 32)(torch.randn(0, 32)).max(),
        lambda: 1 / 0,
    ],
)
def test_of_other_errors_nothing_is_said(make):
    assert raised(make) == NOTHING


@pytest.mark.parametrize(
    ("error", "mixed"),
    [
        (RuntimeError("mat1 and mat2 must have the same dtype, but got Float and BFloat16"), True),
        (RuntimeError("expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"), True),
        (RuntimeError("expected scalar type BFloat16 but found Float"), True),
        (RuntimeError("Input type (float) and bias type (c10::BFloat16) should be the same"), True),
        (RuntimeError("expected mat1 and mat2 to have the same dtype, but got: double != float"), False),
        (RuntimeError('"some_kernel" not implemented for BFloat16'), False),
        (ValueError("the same dtype as BFloat16"), False),
    ],
)
def test_which_errors_are_of_mixed_types(error, mixed):
    assert (known_cause(error)[0] is R.MIXED_TYPES) == mixed
