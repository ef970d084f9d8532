"""What a test makes of a decision: it has no truth value, and its verdict equals its name."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H200, install
from pytest_fp8 import Verdict
from pytest_fp8.codes import L
from pytest_fp8.plain import to_plain
from pytest_fp8.questions.findings import finding
from pytest_fp8.verdicts import passed

ASSERTS = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
    def test_it(fp8_pair):
        assert {what}
"""
CONVERTED_NOTHING = finding(L.NOTHING_CONVERTED, "FP8 layers", "none").answer("layers")


@pytest.mark.parametrize(
    ("roles", "what"), [(("fprop",), "fp8_pair.layers()"), (None, "not fp8_pair.layers()")], ids=["broken", "sound"]
)
def test_a_decision_that_is_asserted_itself_fails_the_test_and_names_what_to_write(pytester, monkeypatch, roles, what):
    install(monkeypatch, H200, executed_roles=roles)
    pytester.makepyfile(ASSERTS.format(what=what))
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *TypeError: a decision on 'layers' has no truth value*fp8_pair.assert_layers()*"])


@pytest.mark.parametrize(("roles", "name"), [(("fprop",), "FAIL"), (None, "PASS")])
def test_a_verdict_that_is_compared_with_its_name_is_told_apart(pytester, monkeypatch, roles, name):
    install(monkeypatch, H200, executed_roles=roles)
    pytester.makepyfile(ASSERTS.format(what=f"fp8_pair.layers().verdict == {name!r}"))
    pytester.runpytest("--fp8-gpu=h200").assert_outcomes(passed=1)


def test_a_verdict_is_its_name():
    assert [str(verdict) for verdict in Verdict] == [verdict.name for verdict in Verdict]
    assert CONVERTED_NOTHING.verdict == "FAIL" != passed("fine").verdict
    assert json.dumps(to_plain(CONVERTED_NOTHING.verdict)) == '"FAIL"'
