"""Speed is measured before the arms are profiled, and only where a test may ask for it."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, SUITE, FakeProcess, install
from helpers.sessions import CHECKPOINTS


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE + CHECKPOINTS)
    return pytester


@pytest.fixture
def requests(monkeypatch):
    """What the arms are asked, in order: (process, operation)."""
    noted = []
    real = FakeProcess.request

    def request(self, operation, *rest, **more):
        noted.append((self.pid, operation))
        return real(self, operation, *rest, **more)

    monkeypatch.setattr(FakeProcess, "request", request)
    return noted


@pytest.mark.parametrize(
    ("asked", "order"),
    [("test_layers and rowwise", ["layers"]), ("(test_layers or test_faster) and rowwise", ["blocks", "layers"])],
)
def test_speed_is_measured_before_presence_and_only_where_a_test_will_ask_for_it(
    suite, monkeypatch, requests, asked, order
):
    install(monkeypatch, H200)
    assert suite.runpytest("--fp8-gpu=h200", "-k", asked).ret == 0
    assert [what for what in dict.fromkeys(what for _, what in requests) if what in ("blocks", "layers")] == order


ONE_TEST = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")]{more})
    def test_both(fp8_pair):
        fp8_pair.assert_layers()
        fp8_pair.assert_speedup()
"""


def test_a_test_that_names_no_question_may_ask_for_speed_and_is_timed_first(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE_TEST.format(more=""))
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    assert [what for what in dict.fromkeys(what for _, what in requests) if what in ("blocks", "layers")] == [
        "blocks",
        "layers",
    ]


def test_speed_that_was_not_announced_is_measured_in_processes_that_nobody_profiled(pytester, monkeypatch, requests):
    install(monkeypatch, H200)
    pytester.makepyfile(ONE_TEST.format(more=", question='layers'"))
    assert pytester.runpytest("--fp8-gpu=h200").ret == 0
    profiled = set()
    for process, operation in requests:
        assert operation != "blocks" or process not in profiled
        profiled |= {process} if operation == "layers" else set()
    assert profiled
