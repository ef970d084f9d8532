"""What travels to an arm by value and what by its name, and what cannot be sent."""

from __future__ import annotations

import functools
import importlib
import inspect
import subprocess
import sys

import pytest

from pytest_fp8 import Workload
from pytest_fp8.errors import Fp8Error
from pytest_fp8.shipping import ship, unimportable_modules, unship


def nothing(step):
    return step


def test_what_cannot_be_sent_is_named_with_its_function():
    import threading

    lock = threading.Lock()

    def batch(step):
        with lock:
            return step

    with pytest.raises(Fp8Error, match="cannot be sent") as refused:
        Workload(build=dict, batch=batch).ship()
    assert refused.value.seen.startswith("batch: TypeError: cannot pickle '_thread.lock'")


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
        import conftest, subprocess, sys
        from conftest import seven
        from pytest_fp8.shipping import ship

        def test_it(tmp_path):
            sent = ship(lambda: conftest.seven() + seven(), "f")
            code = f"from pytest_fp8.shipping import unship; print(unship({sent!r})())"
            run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
            assert run.stdout == "14\\n", run.stderr
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_nothing_of_this_package_goes_by_value(monkeypatch):
    # pytest rewrites the assertions of a plugin's package as it does a test's; and another copy of it may come first.
    monkeypatch.setattr(sys, "path", [])
    local = [module.__name__ for module in unimportable_modules(nothing) + unimportable_modules(Workload.ship)]
    assert __name__ in local
    assert not [name for name in local if name.partition(".")[0] == "pytest_fp8"]


@pytest.mark.slow
def test_a_function_may_mention_a_module_of_a_class_of_its_own():
    import torch.backends.cudnn

    def build():
        torch.backends.cudnn.benchmark = False
        return str(torch.backends.cudnn.__name__)

    assert elsewhere(ship(build, "a function")) == "torch.backends.cudnn"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "uint16", "bfloat16", "complex64", "bool"])
def test_tensors_of_every_type_travel(name):
    """Frozen FP8 weights, or tokens of 16 bits, that a test file holds."""
    import torch

    held = torch.arange(6).to(getattr(torch, name)).reshape(2, 3)
    sent = ship(lambda: [held, held[1]], "a batch")
    whole, row = unship(sent)()
    assert whole.dtype == row.dtype == held.dtype
    assert whole.to(torch.complex64).equal(held.to(torch.complex64))
    assert row.to(torch.complex64).equal(held[1].to(torch.complex64))
    assert row.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.slow
def test_views_of_one_tensor_travel_with_one_copy_of_it():
    """Batches that were split off one tensor, as a user keeps them beside the test."""
    import torch

    tokens = torch.arange(1 << 18)
    rows = [*tokens.split(1 << 8), torch.arange(3)]
    sent = ship(lambda step: rows[step], "a batch")
    assert len(sent) < 2 * tokens.nbytes
    batch = unship(sent)
    assert [int(batch(step)[1]) for step in (0, 1, 1023, 1024)] == [1, 257, 1023 * 256 + 1, 1]
    assert batch(0).untyped_storage().data_ptr() == batch(1023).untyped_storage().data_ptr()
