"""The closing table where the output's encoding has no drawn rule, as in many containers and cron jobs."""

from pathlib import Path

import pytest

CONFTEST = """
    import sys
    sys.path.insert(0, {tests!r})
    from helpers.fakes import FakeProcess
    from pytest_fp8.arms import pool

    pool.ArmProcess = FakeProcess
"""
TEST = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise", emulated=True)])
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""


@pytest.mark.nightly_beyond(1)
@pytest.mark.parametrize(
    ("encoding", "rule"),
    [
        ("ascii", "---"),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (("latin-1", "---"), ("utf-8", "\u2500\u2500\u2500"))
        ),
    ],
)
def test_the_closing_table_keeps_its_lines(pytester, monkeypatch, encoding, rule):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    monkeypatch.setenv("PYTHONUTF8", "0")
    pytester.makeconftest(CONFTEST.format(tests=str(Path(__file__).parent)))
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess("-p", "no:benchmark")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([" case *FLOPs*", f" {rule}*", " tiny-torchao-tensorwise-emulated *"])
