"""Which workloads are one and the same, and what becomes of several under one name."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from pytest_fp8 import Workload
from pytest_fp8.shipping import identity, unship


def nothing(step):
    return step


@dataclasses.dataclass
class Settings:
    width: int


class Project:
    def __init__(self, width):
        self.width = width

    def build(self):
        return self.width

    def __call__(self):
        return self.width


def of_a_dict(width):
    settings = {"width": width}
    return lambda: settings


def of_a_dataclass(width):
    settings = Settings(width)
    return lambda: settings


def of_an_array(width):
    import numpy

    data = numpy.full(3, width)
    return lambda: data


def of_a_method(width):
    return Project(width).build


def of_a_callable(width):
    return Project(width)


def of_a_partial(width):
    return functools.partial(Project, width=width)


def of_a_class_in_a_class(width):
    if width == 1:

        class Block:
            def forward(self):
                return 1
    else:

        class Block:
            def forward(self):
                return 2

    class Model:
        def __init__(self):
            self.block = Block()

    return Model


def name(build):
    return identity(Workload(build=build, batch=nothing).ship())


@pytest.mark.parametrize(
    "builder",
    [of_a_dict, of_a_dataclass, of_an_array, of_a_method, of_a_callable, of_a_partial, of_a_class_in_a_class],
)
def test_workloads_that_differ_in_any_value_are_two_and_alike_ones_are_one(builder):
    assert name(builder(1)) != name(builder(2))
    assert name(builder(1)) == name(builder(1)), "a fixture makes them anew for each test"


@pytest.mark.slow
def test_tensors_and_functions_of_autograd_count_by_what_they_are():
    import torch

    def of_a_tensor(value):
        data = torch.full((3, 4), value, dtype=torch.bfloat16).t()
        return lambda: data

    def of_a_function(value):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x * value

            @staticmethod
            def backward(context, gradient):
                return gradient * value

        return lambda: Scaled.apply

    for builder in (of_a_tensor, of_a_function):
        kept = [builder(1), builder(1), builder(2)]  # all alive, at addresses of their own
        one, same, other = map(name, kept)
        assert one == same != other
    there = unship(Workload(build=of_a_tensor(3), batch=nothing).ship()).build()
    assert (there.shape, there.stride(), there.dtype, float(there[0, 0])) == ((4, 3), (1, 4), torch.bfloat16, 3.0)
    x = torch.ones(2, requires_grad=True)
    unship(Workload(build=of_a_function(3), batch=nothing).ship()).build()(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_what_reads_like_a_drawn_name_and_is_none_counts():
    one, other = "0" * 32, "1" * 32
    assert name(lambda: one) != name(lambda: other)


# -- several models under one name --------------------------------------------------------------------------------

MODELS = """
    import pytest
    from pytest_fp8 import Workload

    @pytest.fixture(params=[{"bypass": False}, {"bypass": True}], ids=["healthy", "broken"])
    def fp8_workload(request):
        settings = request.param

        def build():
            import torch

            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 16)

                def forward(self, x):
                    linear = torch.nn.functional.linear
                    past = settings["bypass"] and type(self.up) is not torch.nn.Linear
                    h = linear(x, self.up.weight, self.up.bias) if past else self.up(x)
                    return self.down(h.relu()).square().mean()

            return Model()

        def batch(step):
            import torch
            return torch.randn(32, 64)

        return Workload(build=build, batch=batch)

    @pytest.mark.fp8(backend="torchao", recipe="tensorwise", emulated=True)
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""


@pytest.mark.slow
def test_a_second_model_under_one_mark_is_asked_for_itself_and_stored_nowhere(pytester):
    pytester.makepyfile(MODELS)
    result = pytester.runpytest("--fp8-report=out")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*never called, which the reference calls*",
            "*own-torchao-tensorwise-emulated *2/2*",
            "*tensorwise-emulated #2*2/2 * FAIL*",
        ]
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_the_error_of_a_model_that_cannot_be_built_is_on_a_row_of_its_own(pytester):
    broken = MODELS.replace("def build():", "def build():\n            assert not settings['bypass'], 'no such model'")
    assert broken != MODELS
    pytester.makepyfile(broken)
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*no such model*",
            "*tensorwise-emulated  *2/2 *",
            "*tensorwise-emulated #2 [[]1] *",
            "[[]1] FP8-R04: see above",
        ]
    )
