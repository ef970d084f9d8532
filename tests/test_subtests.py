"""Subtests of pytest 9: what they ask counts with their test, and is said as any failure is."""

from __future__ import annotations

import pytest

from helpers.fakes import H200, install

pytestmark = pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="pytest 9 brought subtests")


def test_it_ran_once(pytester, monkeypatch):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])
        def test_it(subtests, fp8_pair):
            with subtests.test("layers"):
                fp8_pair.assert_layers()
            with subtests.test("loss"):
                fp8_pair.assert_loss()
            with subtests.test("memory"):
                pytest.skip("not today")
        """
    )
    install(monkeypatch, H200, nan_at=3)
    monkeypatch.setenv("COLUMNS", "200")
    result = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", "--junitxml=out/junit.xml")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["SUBFAILED*test_it*- FAIL FP8-C13: the FP8 arm's loss is not finite*"])
    text = result.stdout.str()
    assert "not run" not in text
    report = (pytester.path / "out" / "report.json").read_text()
    assert '"ran_on_gpu": 1' in report
    assert 'name="fp8_share"' in (pytester.path / "out" / "junit.xml").read_text(), "what the first subtest asked"
