"""What an exception inside an arm shows: the user's own line, the cause that torch does not say, and what to do."""

import functools
import sys

import pytest

from pytest_fp8 import ArmError, Case, Workload
from pytest_fp8.arms.process import ArmProcess
from pytest_fp8.arms.spec import ArmSpec
from pytest_fp8.errors import first_line
from pytest_fp8.worker.error_trace import telling_lines, trace_of, workloads_function

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


def from_cuda(step):
    import torch

    return torch.randn(16, 32, device="cuda")


def misspelt(model, rows):
    return model(rows).square().mean() + regulariser(model)  # noqa: F821


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "seen", "next_step"),
    [
        ({"batch": lambda step: next(iter(()))}, "gave StopIteration in step 0", "batches[step % len(batches)]"),
        ({"build": lambda: plain_model().cuda()}, "build() raised ", "leave the device out"),
        ({"batch": from_cuda}, "batch(step) raised ", "leave the device out"),
        ({"batch": lambda step: sys.exit(3)}, "batch(step) raised SystemExit: 3", "run the lines of the trace by"),
        ({"loss": misspelt}, "name 'regulariser' is not defined", "run the lines of the trace by"),
    ],
    ids=["iterator", "cuda model", "cuda batch", "exit", "name"],
)
def test_the_next_step_is_that_of_the_error(wrong, seen, next_step):
    import torch

    if "device" in next_step and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    workload = Workload(**{"build": plain_model, "batch": batch, "loss": plain_loss, **wrong})
    arm = ArmProcess(fork=True)
    try:
        with pytest.raises(ArmError) as error:
            arm.build(ArmSpec(CASE.reference(), "cpu", workload.ship("a test"), threads=1))
    finally:
        arm.close()
    assert seen in error.value.seen
    assert next_step in error.value.next_step
    if "leave the device" in next_step:
        assert "emulated arms run on the CPU" in error.value.cause


def missing(model, rows):
    raise ImportError("\nscipy was not found")


def not_converted(model, rows):
    if type(model[0]).__name__ != "Linear":
        raise ValueError("no Linear")
    return plain_loss(model, rows)


def said_of(loss, case):
    workload = Workload(build=plain_model, batch=batch, loss=loss)
    arm = ArmProcess(fork=True)
    try:
        with pytest.raises(ArmError) as error:
            arm.build(ArmSpec(case, "cpu", workload.ship("a test"), threads=1))
    finally:
        arm.close()
    return error.value


@pytest.mark.slow
def test_an_error_of_the_converted_model_is_looked_for_there():
    pytest.importorskip("torchao")
    assert "converted to FP8" in said_of(not_converted, CASE).next_step
    of_reference = said_of(missing, CASE.reference())
    assert "converted" not in of_reference.next_step
    assert "ImportError: scipy was not found" in of_reference.headline, "its text begins with an empty line"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("RuntimeError: one\ntwo", "RuntimeError: one"),
        ("ValueError: " + "far too long " * 20, "ValueError: " + "far too long " * 9 + "far too ..."),
        ("", ""),
    ],
)
def test_a_headline_quotes_the_first_line_of_an_error(text, shown):
    assert first_line(text) == shown


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
    assert "# the user's line" in telling_lines(error)


@pytest.mark.slow
def test_a_library_whose_model_raises_is_named_and_torch_is_not():
    def installed(name, text):  # ``called`` of a library's file
        made = {}
        exec(compile(text, f"/env/lib/python3.12/site-packages/{name}.py", "exec"), made)
        return made["called"]

    text = "def called(x):\n    raise ValueError(x)"
    torchs, ours = (installed(name, text) for name in ("torch/nn/functional", "pytest_fp8/hook"))
    models = installed("transformers/models/fake", "def called(below):\n    below('no')")
    mine = telling_lines(raised(lambda: torchs("no"))) + telling_lines(raised(lambda: ours("no")))
    assert mine.count("test_arm_errors.py") == 2
    assert "site-packages" not in mine
    lines = telling_lines(raised(lambda: models(torchs)))
    assert "test_arm_errors.py" in lines.splitlines()[0]
    assert 'transformers/models/fake.py", line 2, in called' in lines
    assert "torch/nn" not in lines
