"""The fixture fp8_workload, where it gives nothing, something else, or what no process can be given."""

import importlib.util

import pytest

from helpers.marks import TWICE

# Not importorskip: torch, imported after `pytester` began, would be imported a second time, which it does not survive.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

LOCK = "lock = threading.Lock(); return Workload(build=lambda: lock, batch=lambda step: lock)"


@pytest.mark.parametrize("fixture", ["fp8_pair", "bf16_model", "fp8_model"])
@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (
            "return LookupError",
            ["FP8-R31: *did not give a workload", "*seen: *<class 'LookupError'>", "*next: *Workload(*"],
        ),
        (
            "Workload(build=list, batch=len)",
            ["FP8-R30: test_mine*: no model to train", "*cause: *yours returns nothing"],
        ),
        (LOCK, ["*cannot be sent to the arm's process*", "*expected:*"]),
    ],
    ids=["a class", "nothing", "a lock"],
)
def test_a_workload_that_cannot_be_had_is_one_error(pytester, fixture, gives, says):
    if gives is LOCK and fixture != "fp8_pair":
        pytest.skip("a model in this process is sent nowhere")
    pytester.makepyfile(
        f"""
        import threading
        import pytest
        from pytest_fp8 import Workload

        @pytest.fixture
        def fp8_workload():
            {gives}

        @pytest.mark.fp8(emulated=True)
        def test_mine({fixture}): pass
        """
    )
    result = pytester.runpytest("-rN")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(says)
    result.stdout.no_fnmatch_line(f"*{TWICE}*")
    result.stdout.no_fnmatch_line("*direct cause*")
