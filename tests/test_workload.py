"""What travels to an arm and how, and which workloads are one and the same."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import subprocess
import sys

import pytest

from pytest_fp8 import Workload
from pytest_fp8.errors import Fp8Error
from pytest_fp8.shipping import identity, ship, unimportable_modules, unship


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


def test_what_cannot_be_sent_is_named_with_the_function_that_refers_to_it():
    import threading

    lock = threading.Lock()

    def batch(step):
        with lock:
            return step

    with pytest.raises(Fp8Error, match="cannot be sent") as refused:
        Workload(build=dict, batch=batch).ship()
    assert refused.value.seen.startswith("batch, which refers to lock: TypeError")


def test_what_a_class_s_methods_refer_to_is_named_too():
    import threading

    lock = threading.Lock()

    class Base:
        def __init__(self):
            super().__init__()

    class Model(Base):
        def forward(self, x):
            with lock:
                return x

    with pytest.raises(Fp8Error, match="cannot be sent") as refused:
        Workload(build=Model, batch=nothing).ship()
    assert refused.value.seen.startswith("build, which refers to lock: TypeError")
    with pytest.raises(Fp8Error) as refused:
        Workload(build=lambda: Model().train(), batch=nothing).ship()
    assert refused.value.seen.startswith("build, which refers to Model, which refers to lock: TypeError")


def test_what_reads_like_a_drawn_name_and_is_none_counts():
    one, other = "0" * 32, "1" * 32
    assert name(lambda: one) != name(lambda: other)


# -- what goes by value and what by its name ----------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package beside the tests, importable, with things that cannot be pickled."""
    package = tmp_path / "fp8_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    code = "import threading\nLOCK = threading.Lock()\ndef build():\n    return LOCK and 7\n"
    (package / "locked.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fp8_project.locked")
    for module in [module for module in sys.modules if module.startswith("fp8_project")]:
        del sys.modules[module]


def elsewhere(text, *path):
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}; from pytest_fp8.shipping import unship; "
    asked = [sys.executable, "-c", code + f"print(unship({text!r})())"]
    return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_an_ordinary_module_s_function_goes_by_its_name(project, tmp_path):
    assert elsewhere(ship(project.build, "a function"), tmp_path) == "7"


def test_a_module_that_is_found_nowhere_goes_by_value(project, tmp_path, monkeypatch):
    (tmp_path / "fp8_project/plain.py").write_text("def build():\n    return 8\n")
    plain = importlib.import_module("fp8_project.plain")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.setattr(sys.modules["fp8_project"], "__path__", [])
    assert elsewhere(ship(plain.build, "a function")) == "8"


def test_this_test_s_own_function_goes_by_value():
    assert elsewhere(ship(functools.partial(nothing, 9), "a function")) == "9"


def test_code_that_goes_by_value_keeps_the_name_of_its_file():
    def outer():
        def inner():
            return [step * 2 for step in range(3)]

        return inner

    sent = unship(ship(outer, "a test"))
    assert sent is not outer
    assert {code.co_filename for code in (sent.__code__, sent().__code__)} == {__file__}
    assert inspect.getsource(sent) == inspect.getsource(outer)
    assert sent()() == [0, 2, 4]


def test_a_conftest_s_function_goes_by_value_from_a_test_that_names_it(pytester):
    pytester.makeconftest("def seven():\n    return 7\n")
    pytester.makepyfile(
        """
        import subprocess, sys
        from conftest import seven
        from pytest_fp8.shipping import ship

        def test_it(tmp_path):
            code = f"from pytest_fp8.shipping import unship; print(unship({ship(lambda: seven(), 'f')!r})())"
            run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
            assert run.stdout == "7\\n", run.stderr
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_nothing_of_this_package_goes_by_value(monkeypatch):
    # pytest rewrites the assertions of a plugin's package as it does a test's; and another copy of it may come first.
    monkeypatch.setattr(sys, "path", [])
    local = [module.__name__ for module in unimportable_modules(nothing) + unimportable_modules(Workload.ship)]
    assert __name__ in local
    assert not [name for name in local if name.partition(".")[0] == "pytest_fp8"]


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


@pytest.mark.any_pytest
@pytest.mark.slow
def test_a_second_model_under_one_mark_is_asked_for_itself_and_stored_nowhere(pytester):
    pytester.makepyfile(MODELS)
    result = pytester.runpytest("--fp8-report-dir=out")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*never called, which the reference calls*",
            "*own-torchao-tensorwise-emulated *2/2*",
            "*tensorwise-emulated #2*2/2 FAIL*",
            "*no candidate*name=*",
        ]
    )
    assert not (pytester.path / "out/candidates").exists(), "whose would it be"


@pytest.mark.slow
def test_the_error_of_a_model_that_cannot_be_built_is_on_a_row_of_its_own(pytester):
    broken = MODELS.replace("def build():", "def build():\n            assert not settings['bypass'], 'no such model'")
    assert broken != MODELS
    pytester.makepyfile(broken)
    result = pytester.runpytest()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*tensorwise-emulated  *2/2 *", "*tensorwise-emulated #2 [[]1] *", "[[]1] *no such model*"]
    )


@pytest.mark.slow
def test_a_function_may_mention_a_module_of_a_class_of_its_own():
    import torch.backends.cudnn

    def build():
        torch.backends.cudnn.benchmark = False
        return str(torch.backends.cudnn.__name__)

    assert elsewhere(ship(build, "a function")) == "torch.backends.cudnn"


@pytest.mark.any_pytest
@pytest.mark.slow
def test_a_test_file_may_set_flags_of_cudnn(pytester):
    pytester.makepyfile(
        """
        import torch
        from pytest_fp8 import Workload

        torch.backends.cudnn.benchmark = False

        def build():
            with torch.backends.cudnn.flags(enabled=False):
                return torch.nn.Linear(16, 16)

        def test_it():
            from pytest_fp8.shipping import identity, unship
            one, two = (Workload(build=build, batch=lambda step: step).ship() for _ in range(2))
            assert identity(one) == identity(two)
            assert unship(one).build().in_features == 16
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
