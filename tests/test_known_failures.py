"""What fails as known, in a run's report: said beside the case's verdict, never in its place or for another failure."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H200, install

SUITE = """
import pytest

CASE = dict(model="tiny", backend="torchao", recipe="rowwise")

@pytest.mark.xfail(strict=True, reason="somelib 1.2: leaves its backward in BF16")
@pytest.mark.fp8(**CASE, question="layers")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()

@pytest.mark.fp8(**CASE, question="loss")
def test_loss(fp8_pair):
    fp8_pair.assert_loss()

@pytest.mark.fp8(model="tiny", backend="torchao", recipe="tensorwise", question="loss")
def test_another(fp8_pair):
    fp8_pair.assert_loss()

@pytest.mark.fp8(model="micro", backend="torchao", recipe="tensorwise", question="loss")
def test_unasked(fp8_pair):
    pytest.xfail("this host is slow")
"""


@pytest.fixture
def files(pytester, monkeypatch):
    """What a run of the suite, with these changes of its arms, writes: the report, the summary and the page."""

    def run(*options, **world):
        install(monkeypatch, H200, executed_roles=("fprop",), **world)
        pytester.makepyfile(SUITE)
        run = pytester.runpytest("--fp8-gpu=h200", "--fp8-report-dir=out", *options)
        assert run.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        out = pytester.path / "out"
        return json.loads((out / "report.json").read_text()), (out / "summary.md").read_text(), out / "index.html"

    return run


def test_a_known_failure_stands_beside_the_verdict_of_what_else_was_asked(files):
    report, summary, page = files()
    known = {name: entry["decisions"] for name, entry in report["entries"].items()}["tiny-torchao-rowwise"]
    assert known["layers"]["as_known"]
    assert "as_known" not in known["loss"]
    first, *_ = summary.splitlines()
    assert first.startswith("## FP8: ")
    assert "2 PASS" in first
    assert "FAIL" not in first
    assert "in 2 cases something fails as known" in first
    assert "| tiny-torchao-rowwise | PASS; fails as known: layers |" in summary
    assert "| tiny-torchao-tensorwise | PASS |" in summary
    assert "; a test fails as known |" in summary, "it asked nothing before it failed"
    assert "**tiny-torchao-rowwise**, layers" in summary, "what it says is still there"
    html = page.read_text()
    assert '<span class="v FAIL">FAIL</span> <span class="soft">as known</span>' in html
    assert '<span class="v PASS">PASS</span> <span class="soft">fails as known: layers</span>' in html


def test_another_failure_of_the_same_case_is_not_called_known(files):
    _, summary, page = files(nan_at=3)
    assert "2 FAIL" in summary.splitlines()[0]
    assert "| tiny-torchao-rowwise | FAIL; fails as known: layers |" in summary
    assert '<details class="case" open>\n<summary>tiny-torchao-rowwise <span class="v FAIL">' in page.read_text()


def test_a_case_of_which_nothing_else_was_asked_has_the_verdict_that_is_known(files):
    _, summary, _ = files("-k", "test_layers")
    assert summary.splitlines()[0] == "## FP8: 1 FAIL; in 1 case something fails as known"
