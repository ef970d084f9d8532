"""What an exception inside an arm shows: the user's own line, the cause that torch does not say, and what to do."""

import functools

import pytest

from pytest_fp8 import ArmError, Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.worker.error_trace import telling_line, trace_of, workloads_function

CASE = Case(model="own", backend="torchao", recipe="tensorwise", emulated=True)


def build():
    import torch

    class WithPositions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))

        def forward(self, x):
            positions = torch.arange(32).float().sin()
            return self.net(x + positions)

    return WithPositions()


def batch(step):
    import torch

    return torch.randn(16, 32)


@pytest.mark.slow
def test_a_tensor_of_another_type_is_named_with_the_users_line_and_what_to_do():
    arm = ArmProcess(fork=True)
    try:
        with pytest.raises(ArmError) as error:
            arm.build(ArmSpec(CASE.reference(), "cpu", Workload(build=build, batch=batch).ship("a test"), threads=1))
    finally:
        arm.close()
    assert "must have the same dtype" in error.value.seen
    assert "return self.net(x + positions)" in error.value.seen
    assert "in forward" in error.value.seen
    assert "must take the input's dtype" in error.value.cause
    assert ".to(x.dtype)" in error.value.next_step


class Batches:
    def missing(self, step):
        return {}["x"]


def failing_loss(model, batch, times):
    return model(batch, times).mean()


def failing_optimizer(parameters):
    raise OSError("no such schedule")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": Batches().missing}, "the workload's batch(step) raised KeyError: 'x'"),
        ({"loss": functools.partial(failing_loss, times=3)}, "the workload's loss(model, batch) raised TypeError: "),
        ({"optimizer": failing_optimizer}, "the workload's optimizer(parameters) raised OSError: no such schedule"),
        ({"build": lambda held=[]: held[0]}, "the workload's build() raised IndexError: "),
    ],
)
def test_the_function_that_failed_is_named(wrong, says):
    workload = Workload(**{"build": plain_model, "batch": batch, "loss": plain_loss, **wrong})
    error = raised(lambda: serve_workload(workload))
    assert f"the workload's {workloads_function(error)} raised {type(error).__name__}: {error}".startswith(says)
    assert "pytest_fp8/worker" not in trace_of(error)


def plain_model():
    import torch

    return torch.nn.Linear(32, 32)


def plain_loss(model, rows):
    return model(rows).square().mean()


def serve_workload(workload):
    from pytest_fp8.worker.server import ArmServer

    return ArmServer(ArmSpec(CASE.reference(), "cpu", workload.ship("a test"), threads=1))


@pytest.mark.slow
def test_one_live_model_for_all_is_named_and_a_copy_of_one_is_fine():
    import copy

    model = plain_model()
    given = {"batch": batch, "loss": plain_loss}
    error = raised(lambda: serve_workload(Workload(build=lambda: model, **given)).restart(1))
    assert "build() gave one Linear that was made before" in str(error)
    assert "copy.deepcopy" in error.fp8_next
    serve_workload(Workload(build=lambda: copy.deepcopy(model), **given))


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def deep_in_torch():
    import torch

    torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)))(torch.ones(2, 3))  # the user's line


@pytest.mark.slow
def test_a_trace_keeps_the_users_frame_above_many_of_torchs():
    error = raised(deep_in_torch)
    trace = trace_of(error)
    assert "# the user's line" in trace
    assert "  ...\n" in trace
    assert "in forward" in trace
    assert trace.rstrip().endswith("shapes cannot be multiplied (2x3 and 4x4)")
    assert "# the user's line" in telling_line(error)
