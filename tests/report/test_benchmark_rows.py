"""Step times in pytest-benchmark's table, and none where that plugin is off."""

import json

import pytest

from helpers.fakes import H200, install

pytest.importorskip("pytest_benchmark")

SUITE = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
    def test_faster(fp8_pair):
        fp8_pair.assert_faster()
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    install(monkeypatch, H200)
    # The inner run is not distributed, whatever the outer one is.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(SUITE)
    return pytester


def test_both_arms_of_a_case_are_a_group(suite):
    result = suite.runpytest("--benchmark-json=out.json")
    result.stdout.fnmatch_lines(["*benchmark 'tiny-torchao-rowwise': 2 tests*", "*tiny-torchao-rowwise?fp8?*"])
    rows = json.loads((suite.path / "out.json").read_text())["benchmarks"]
    assert {row["name"] for row in rows} == {"tiny-torchao-rowwise[bf16]", "tiny-torchao-rowwise[fp8]"}
    rounds = {row["stats"]["rounds"] for row in rows}
    assert len(rounds) == 1, "as many blocks of the one arm as of the other"
    assert rounds.pop() == 12, "two entries for each of the first six ABBA blocks, which settle it"
    assert rows[0]["stats"]["median"] == pytest.approx(0.1, rel=0.01), "seconds"


@pytest.mark.parametrize("arguments", [("--benchmark-disable",), ("-p", "no:benchmark")])
def test_none_where_it_is_off(suite, arguments):
    result = suite.runpytest(*arguments)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*benchmark 'tiny*")
