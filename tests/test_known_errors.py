"""Errors that a user's code raises in an arm, and what is said of where they come from."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torchao")

from helpers.loops import serve
from pytest_fp8.codes import R
from pytest_fp8.worker.known_errors import known_cause
from pytest_fp8.worker.training.step import WorkloadError

pytestmark = pytest.mark.slow

NOTHING = (R.ARM_RAISED, "", "")


def raised(make):
    """What is said of the error that a library raises."""
    try:
        make()
    except Exception as error:
        return known_cause(error)
    pytest.fail("no error")


def test_classes_as_floating_point_numbers():
    import torch

    logits, classes = torch.randn(4, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)
    code, _, next_step = raised(lambda: torch.nn.functional.cross_entropy(logits, classes))
    assert code is R.CLASSES_AS_FLOATS
    assert "y.long()" in next_step


@pytest.mark.parametrize("operator", ["fft.rfft", "linalg.svd", "linalg.inv"])
def test_an_operator_without_bfloat16(operator):
    import operator as operators

    import torch

    x = torch.eye(4, dtype=torch.bfloat16)
    code, _, next_step = raised(lambda: operators.attrgetter(operator)(torch)(x))
    assert code is R.NO_BF16_OPERATOR
    assert "x.float()" in next_step


def test_batch_norms_of_all_ranks_on_the_cpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    norm = torch.nn.SyncBatchNorm(4)
    code, _, next_step = raised(lambda: norm(torch.ones(2, 4)))
    assert code is R.NEEDS_NCCL
    assert "without emulated=True" in next_step


def test_a_schedule_that_is_shorter_than_the_curve():
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)

    def train():
        for _ in range(5):
            optimizer.step()
            schedule.step()

    code, _, next_step = raised(train)
    assert code is R.SCHEDULE_ENDS
    assert "steps" in next_step


def test_a_gradient_of_a_gradient():
    def penalised(model, x):
        import torch

        given = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(given).float().sum(), given, create_graph=True)
        return gradient.float().square().mean()

    code, _, next_step = raised(lambda: serve(loss=penalised))
    assert code is R.SECOND_DERIVATIVE
    assert "leave=" in next_step


def test_an_output_that_is_changed_in_place():
    def build():
        from torch import nn

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(32, 32, bias=False)

            def forward(self, x):
                y = self.layer(x.unflatten(0, (-1, 16)))
                y *= 2
                return y

        return Scaled()

    code, _, next_step = raised(lambda: serve(build=build, loss=lambda model, x: model(x).float().square().mean()))
    assert code is R.CHANGED_IN_PLACE
    assert "leave=" in next_step


@pytest.mark.parametrize("module", ["pickle", "no_such_module", "test_known_errors"])
def test_a_class_of_the_test_file_that_a_save_function_pickles(module):
    import pickle

    class Pickler:
        """Named as what the module has under this name, or has not."""

    Pickler.__module__, Pickler.__qualname__ = module, "Pickler"
    code, _, next_step = raised(lambda: pickle.dumps(Pickler()))
    assert code is R.CANNOT_PICKLE
    assert "dataclasses.asdict(config)" in next_step


def test_an_optimizer_that_is_no_whole_one():
    import torch

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups

    wrapper = Wrapper(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    code, _, next_step = raised(lambda: wrapper.register_step_pre_hook(print))
    assert code is R.BAD_OPTIMIZER
    assert "self.optimizer" in next_step


def test_a_conversion_that_takes_all_that_is_trained():
    def build():
        import torch
        from torch import nn

        class Adapted(nn.Linear):
            def __init__(self):
                super().__init__(32, 32)
                self.requires_grad_(False)
                self.more = nn.Parameter(torch.zeros(32, 32))

            def forward(self, x):
                return super().forward(x) + nn.functional.linear(x, self.more)

        return nn.Sequential(Adapted(), nn.GELU(), Adapted())

    with pytest.raises(WorkloadError) as failure:
        serve(build=build, loss=lambda model, x: model(x).float().square().mean())
    assert failure.value.fp8_code is R.TRAINABLE_LOST


def test_an_optimizer_that_wants_a_closure():
    import torch

    code, _, next_step = raised(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]).step)
    assert code is R.NEEDS_CLOSURE
    assert "Workload(step=" in next_step


@pytest.mark.parametrize("given", [None, 3, "text"])
@pytest.mark.parametrize("layer", ["Linear", "Embedding"])
def test_a_batch_that_is_no_tensor(layer, given):
    import torch

    code, _, next_step = raised(lambda: getattr(torch.nn, layer)(4, 4)(given))
    assert code is R.NO_TENSOR
    assert "batch(step)" in next_step


def test_a_slip_with_a_number_in_the_loss_is_not_charged_to_the_batch():
    import torch

    assert raised(lambda: torch.isnan(0.5)) == NOTHING
    assert raised(lambda: torch.nn.functional.cross_entropy(torch.randn(2, 2), 5)) == NOTHING


def test_what_the_users_own_line_raises_is_to_be_looked_at_there():
    def build():
        raise ValueError("no such model")

    def in_one_line(): raise ValueError("no such model")  # fmt: skip

    for function in (build, in_one_line):
        code, cause, next_step = raised(function)
        assert (code, cause) == (R.ARM_RAISED, "")
        assert f"test_known_errors.py, in {function.__name__}, raised it: see what it checks" in next_step

    def divide():
        return [0][0] / 0

    assert raised(divide) == NOTHING, "whether its line is to blame nobody knows"


@pytest.mark.parametrize(
    ("recipe", "layer", "left"),
    [
        ("tensorwise", "layer 'experts.1' was given 0 rows (shape (0, 32))", "leave=('experts.1',)"),
        # In its backward pass.
        ("rowwise", "an FP8 layer was given 0 rows", "leave=(names,)"),
    ],
)
def test_an_expert_without_rows_is_told(recipe, layer, left):
    import torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

        def forward(self, x):
            return self.experts[0](x).sum() + self.experts[1](x[:0]).sum()

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = convert_to_float8_training(Routed(), config=config)
    code, cause, next_step = raised(lambda: model(torch.randn(16, 32)).backward())
    assert code is R.NO_ROWS
    assert layer in cause
    assert "pad_to_multiple(rows)" in next_step
    assert left in next_step


def test_another_error_of_a_layer_without_rows_is_not_put_on_them():
    import torch

    assert raised(lambda: torch.nn.Linear(32, 32)(torch.randn(0, 48))) == NOTHING
    assert raised(lambda: torch.nn.Linear(32, 32)(torch.randn(0, 32)).max()) == NOTHING


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
