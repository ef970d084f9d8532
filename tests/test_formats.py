"""What other tools and a pull request get of a run: properties, Markdown, and the closing FAILED line."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from helpers.fakes import H200, SUITE, install
from helpers.report_data import HOSTILE, decision, entry_of, report_of
from pytest_fp8.report.cells import COLUMNS, cells_of
from pytest_fp8.report.exports import properties
from pytest_fp8.report.files import write_beside
from pytest_fp8.report.summary import markdown

STORED = next((Path(__file__).parents[1] / "baselines/h100").glob("1b-*.json"))


def test_the_summary_has_a_row_per_case_and_says_what_to_do():
    failed = decision("FAIL", "FAIL: slow\n  cause:    a cast\n  next:     fuse it")
    text = markdown(report_of(entry_of("fine"), entry_of("slow", decisions={"faster": failed})))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2].startswith("| slow | FAIL |")
    assert rows[3].startswith("| fine | PASS |")
    assert "next:     fuse it" in text


def test_the_summary_says_what_a_pass_names():
    said = decision(notes=["2 of 3 Linears stay in BF16"])
    text = markdown(report_of(entry_of("fine", decisions={"layers": said, "numerics": said})))
    assert text.count("\nfine: 2 of 3 Linears stay in BF16\n") == 1


@pytest.mark.parametrize(
    ("numbers", "cell"),
    [
        ({"gradient_error": 0.19, "gain_error": 0.2, "products": 9}, "19.0%"),
        ({"gradient_error": None, "gain_error": 0.28, "products": 9}, "factor 1+-0.28"),
        ({"products": 9}, "9 products"),
        ({}, "-"),
    ],
)
def test_gradients_are_told_as_far_as_they_were_compared(numbers, cell):
    entry = entry_of(decisions={"numerics": decision(**numbers)})
    assert cells_of(entry)[[*COLUMNS].index("gradients off BF16")] == cell


def test_hostile_text_breaks_no_row_and_is_no_html():
    failed = decision("FAIL", HOSTILE)
    text = markdown(
        report_of(entry_of("a", decisions={"faster": failed}, errors=["x | y\n# z <b> @all"], expected=["k"]))
    )
    assert "<script" not in text
    assert "<b>" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| ")}) == 1


def test_properties_hold_the_figures():
    said = entry_of()["decisions"] | {"layers": decision(fp8_share=0.787)}
    found = dict(properties("c", "PASS", said))
    assert found["fp8_case"] == "c"
    assert found["fp8_share"] == 0.787
    assert found["fp8_speedup"] == 1.13
    assert found["fp8_speedup_limit"] == 1.3
    assert found["fp8_loss_gap"] == 0.001
    assert found["fp8_memory_ratio"] == 0.9


def test_github_s_summary_is_appended_to(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    step = tmp_path / "step.md"
    step.write_text("before\n")
    written, notes = write_beside(tmp_path / "report.json", {"GITHUB_STEP_SUMMARY": str(step)})
    assert not notes
    assert "summary.md" in {path.name for path in written}
    assert step.read_text() == "before\n" + (tmp_path / "summary.md").read_text()


def test_what_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    _, [note] = write_beside(tmp_path / "report.json", {"GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "folder")})
    assert note.startswith(f"the summary was not added to GITHUB_STEP_SUMMARY={tmp_path}")


def test_a_page_that_cannot_be_drawn_is_told_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_fp8.report.page.write.missing", lambda: ["jinja2", "matplotlib"])
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    written, [note] = write_beside(tmp_path / "report.json", {})
    assert note == "no page was written, which needs jinja2 and matplotlib: pip install 'pytest-fp8[report]'"
    assert "index.html" not in {path.name for path in written}
    (tmp_path / "report.json").write_text(json.dumps(report_of()))
    assert write_beside(tmp_path / "report.json", {})[1] == [], "there is nothing to draw"


def test_a_page_that_fails_takes_no_summary_along(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyError("font")

    monkeypatch.setattr("pytest_fp8.report.page.write.missing", list)
    monkeypatch.setattr("pytest_fp8.report.page.write.write_page", broken)
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    _, [note] = write_beside(tmp_path / "report.json", {"GITHUB_STEP_SUMMARY": str(tmp_path / "shown")})
    assert note == "not all of the report was written: KeyError: 'font'"
    assert (tmp_path / "shown").read_text().startswith("## FP8")


@pytest.mark.parametrize("file", ["summary.md", "index.html"])
def test_a_full_disk_is_told_in_the_system_s_words(tmp_path, monkeypatch, file):
    replaced = os.replace

    def full(source, target):
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)
        replaced(source, target)

    monkeypatch.setattr("pytest_fp8.report.page.write.missing", list)
    monkeypatch.setattr("pytest_fp8.report.page.write.render", lambda reports: "a page")
    monkeypatch.setattr("os.replace", full)
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    _, [note] = write_beside(tmp_path / "report.json", {})
    assert note == f"not all of the report was written: could not write {tmp_path / file}: No space left on device"


def test_a_disk_that_is_full_while_a_page_is_drawn_is_told_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/fonts")

    monkeypatch.setattr("pytest_fp8.report.page.write.missing", list)
    monkeypatch.setattr("pytest_fp8.report.page.write.write_page", full)
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    _, [note] = write_beside(tmp_path / "report.json", {})
    assert note == "not all of the report was written: /cache/fonts: No space left on device"


@pytest.fixture
def failing(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=0.8)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    pytester.makepyfile(SUITE)
    return pytester


def test_a_failed_line_begins_with_the_headline(failing):
    lines = failing.runpytest("--fp8-gpu=h200").outlines
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed
    assert all(" - FAIL FP8-S09: " in line and "CheckFailed" not in line for line in failed)


def test_a_run_writes_them_all(failing):
    failing.runpytest("--fp8-gpu=h200", "--fp8-report=out", "--junit-xml=junit.xml")
    assert {"report.json", "summary.md"} <= {path.name for path in Path("out").iterdir()}
    text = Path("junit.xml").read_text()
    assert '<property name="fp8_speedup" value="0.8' in text
    assert '<property name="fp8_headline" value="' in text


def test_files_of_others_stay_where_a_report_is_written(failing):
    mine = failing.path / "out/mine/work.json"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    (failing.path / "out/index.html").write_text("mine")
    for _ in range(2):
        failing.runpytest("--fp8-gpu=h200", "--fp8-report=out")
        assert mine.read_text() == "{}"
        assert (failing.path / "out/report.json").exists()


def test_a_folder_in_a_file_s_place_ends_no_session_by_its_own_error(failing):
    failing.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    (failing.path / "out/summary.md").unlink()
    (failing.path / "out/summary.md").mkdir()
    result = failing.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    result.stdout.fnmatch_lines(["*not all of the report was written: could not write *summary.md: Is a directory"])


def test_a_test_that_fails_as_expected_has_its_verdict_for_other_tools(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=0.8)
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case
        pytestmark = pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise")])

        @pytest.mark.xfail(reason="known")
        def test_known(fp8_pair): fp8_pair.assert_faster()

        def test_skips(fp8_pair): pytest.skip("not today")

        def test_fails(fp8_pair): fp8_pair.assert_faster()

        def test_passes(fp8_pair): fp8_pair.assert_layers()
        """
    )
    pytester.runpytest("--fp8-gpu=h200", "--junit-xml=junit.xml").assert_outcomes(
        xfailed=1, skipped=1, failed=1, passed=1
    )
    text = Path("junit.xml").read_text()
    assert re.findall(r'name="fp8_verdict" value="(\w+)"', text) == ["FAIL", "NOT_EXERCISED", "FAIL", "PASS"]


def test_a_session_without_an_answer_leaves_no_earlier_report(failing, monkeypatch):
    failing.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    left = failing.path / "out"
    (left / "notes.txt").write_text("mine")
    assert (left / "summary.md").exists()
    for other in (["--markers"], ["--collect-only"], ["nowhere.py"], ["-p", "no:fp8", "--version"]):
        failing.runpytest("--fp8-report=out", *other)
    assert (left / "summary.md").exists(), "that was no session"
    install(monkeypatch, None)
    assert failing.runpytest("--fp8-gpu=h200", "--fp8-report=out").ret == 1
    names = {path.name for path in left.iterdir()}
    assert names == {"notes.txt", "report.json", "summary.md"}, "nobody takes those answers for this session's"
    assert json.loads((left / "report.json").read_text())["entries"] == {}


def test_a_session_that_ends_before_its_fp8_tests_leaves_no_earlier_report(failing):
    failing.runpytest("--fp8-gpu=h200", "--fp8-report=out")
    left = failing.path / "out"
    assert (left / "report.json").exists()
    (failing.path / "test_a.py").write_text("def test_first():\n    assert False\n")
    failing.runpytest("--fp8-gpu=h200", "--fp8-report=out", "-x")
    assert {path.name for path in left.iterdir()} == {"report.json", "summary.md"}
    report = json.loads((left / "report.json").read_text())
    assert report["entries"] == {}
    assert report["open_tests"]


@pytest.mark.slow
def test_workers_that_answer_nothing_leave_no_earlier_report(pytester):
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case

        @pytest.mark.skip(reason="not today")
        @pytest.mark.fp8(cases=[Case("tiny", "torchao", "tensorwise")])
        def test_it(fp8_pair):
            pass
        """
    )
    left = pytester.path / "out"
    left.mkdir()
    (left / "report.json").write_text(json.dumps(report_of(entry_of())))
    pytester.runpytest_subprocess("--fp8-report=out", "-n", "2", "-p", "no:cacheprovider")
    report = json.loads((left / "report.json").read_text())
    assert (report["entries"], len(report["not_run"])) == ({}, 1)
