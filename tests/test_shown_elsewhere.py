"""What GitHub shows of a run at the lines of its tests, and pytest-html in its table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.fakes import H200, install
from pytest_fp8.report.exports import commands

SUITE = """\
import pytest
from pytest_fp8 import Case

pytestmark = pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])


def test_layers(fp8_pair):
    fp8_pair.assert_layers()


def test_speed(fp8_pair):
    fp8_pair.assert_speedup()


def test_memory(fp8_pair):
    fp8_pair.assert_memory()


def test_loss(fp8_pair):
    fp8_pair.assert_loss()
"""
WORKERS_TOO = """
import sys

sys.path.insert(0, {tests!r})
import pytest
from helpers.fakes import H200, install

install(pytest.MonkeyPatch(), H200, executed_roles=("fprop",), strangers=(4242,))
"""
FAILED = (
    "::error file={file},line=8,title=tiny-torchao-rowwise%3A FAIL*::FAIL*: converted but not executed in *%0A*next*"
)
UNANSWERED = "::{level} file={file},line=11,title=tiny-torchao-rowwise%3A INVALID*::another process used the GPU*"


@pytest.fixture
def suite(pytester, monkeypatch):
    install(monkeypatch, H200, executed_roles=("fprop",), strangers=(4242,))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    folder = pytester.mkdir("sub")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_fp8.py").write_text(SUITE)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    monkeypatch.chdir(folder)
    return pytester


def of_github(result):
    return [line for line in result.outlines if line.startswith("::")]


@pytest.mark.parametrize(("args", "level"), [(("--fp8-gpu=h200",), "error"), ((), "warning")])
def test_failed_and_undecided_tests_are_annotated_from_the_top_of_the_checkout(suite, args, level):
    result = suite.runpytest("-q", *args)
    said = of_github(result)
    file = "sub/test_fp8.py"
    result.stdout.fnmatch_lines([FAILED.format(file=file), UNANSWERED.format(file=file, level=level)])
    assert not [line for line in said if "line=19" in line], "the loss passed"


def test_elsewhere_there_are_none(suite, monkeypatch):
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert of_github(suite.runpytest("--fp8-gpu=h200")) == []


@pytest.mark.oldest
@pytest.mark.slow
def test_xdist_s_controller_annotates(suite):
    pytest.importorskip("xdist")
    Path("conftest.py").write_text(WORKERS_TOO.format(tests=str(Path(__file__).parent)))
    said = of_github(suite.runpytest_subprocess("-n1", "--fp8-gpu=h200"))
    assert [line.split(" ")[0] for line in said] == ["::error"] * 3
    assert not any("[gw0]" in line for line in said), "the message, and not the line that xdist puts before it"


def test_hostile_text_ends_no_command_and_others_may_annotate_failures():
    report = SimpleNamespace(
        about_fp8=True,
        location=("a,b:c.py", 4, "test_a"),
        nodeid="a,b:c.py::test_a",
        user_properties=[],
        longrepr="x\n::error::y\r%0A",
        longreprtext="x\n::error::y\r%0A",
    )

    def said(kind, failures=True):
        return commands({kind: [report]}, Path("/top"), {"GITHUB_ACTIONS": "true"}, problems=False, failures=failures)

    [line] = said("error")
    assert line == "::error file=a%2Cb%3Ac.py,line=5,title=test_a%3A FAIL::x%0A::error::y%0D%250A"
    assert said("failed", failures=False) == []
    del report.about_fp8
    assert said("failed") == said("error") == [], "no FP8 test, or a file that could not be collected"


def test_pytest_html_has_answers_numbers_and_the_page(suite, monkeypatch):
    pytest.importorskip("pytest_html")
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("GITHUB_ACTIONS")
    suite.runpytest("--html=out/all.html", "--fp8-report=report")
    folder = suite.path / "sub"
    page = (folder / "out/all.html").read_text()
    assert "converted but not executed in FP8" in page
    assert "../report/index.html" in page
    assert (folder / "report/index.html").exists()
    found = [json.loads(path.read_text()) for path in folder.glob("out/assets/*.json")]
    assert {question for each in found for question in each} == {"layers", "speedup", "memory", "loss"}
    assert re.search(r"fp8_share", page)


def test_a_test_in_a_folder_called_fp8_is_not_annotated_for_that(suite):
    folder = Path("fp8")
    folder.mkdir()
    (folder / "test_other.py").write_text("def test_fp8():\n    assert 1 == 2\n")
    assert of_github(suite.runpytest("-q", "fp8")) == []
