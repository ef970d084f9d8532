"""The fixture fp8_workload, where it gives nothing, something else, or what no process can be given."""

import importlib.util

import pytest

from helpers.marks import TWICE

# Not importorskip: torch, imported after `pytester` began, would be imported a second time, which it does not survive.
with_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


@with_torchao
def test_a_pair_that_cannot_be_had_is_one_error(pytester):
    """The workload's function holds a lock, which no other process can be given."""
    pytester.makepyfile(
        """
        import threading
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            lock = threading.Lock()
            return Workload(build=lambda: lock, batch=lambda step: lock)

        @pytest.mark.fp8(emulated=True)
        def test_mine(fp8_pair): pass
        """
    )
    result = pytester.runpytest("-rN")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*cannot be sent to the arm's process*", "*expected:*"])
    result.stdout.no_fnmatch_line(f"*{TWICE}*")
    result.stdout.no_fnmatch_line("*direct cause*")


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "bf16_model", "fp8_model"])
def test_a_workload_fixture_that_gives_something_else_is_named(pytester, fixture):
    pytester.makepyfile(
        f"""
        import pytest

        class Net: pass

        @pytest.fixture
        def fp8_workload():
            return Net

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "FP8-R31: the fixture fp8_workload did not give a workload",
            "*expected: pytest_fp8.Workload(build=..., batch=...), or None*",
            "*seen: *a class: <class '*.Net'>, from test_a_workload_*.py:5",
            "*cause: *",
            "*next: *return Workload(build=*",
        ]
    )


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "bf16_model", "fp8_model"])
def test_a_workload_fixture_without_a_return_is_named(pytester, fixture):
    pytester.makeconftest(
        """
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            Workload(build=lambda: None, batch=lambda step: None)
        """
    )
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "FP8-R30: test_mine*: the fixture fp8_workload gave None*",
            "*seen: *None, from conftest.py:4",
            "*next: *return Workload(*",
        ]
    )


@with_torchao
@pytest.mark.parametrize("fixture", ["fp8_pair", "fp8_model"])
def test_a_mark_without_a_model_and_no_fixture_says_that_none_overrides(pytester, fixture):
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["FP8-R30: test_mine*: no model to train", "*cause: *no fixture fp8_workload here overrides*"]
    )
