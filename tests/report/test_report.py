"""The files of a run: written whole, read strictly, and a page that is one file without network."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from helpers.baselines import mutants
from helpers.fakes import H200, SUITE, install
from helpers.records import HOSTILE, NAME, case_of, report_of, said, write_journal
from pytest_fp8.cli import main
from pytest_fp8.codes import R
from pytest_fp8.errors import Fp8Error
from pytest_fp8.libraries import documentation
from pytest_fp8.plain import finite
from pytest_fp8.report.files import properties, read_report, write_beside, write_report
from pytest_fp8.report.page import render
from pytest_fp8.report.record import SCHEMA
from pytest_fp8.report.rows import Curve, Evidence

COUNT = 100


@pytest.fixture
def session(pytester, monkeypatch):
    """The folder of a session's report."""
    install(monkeypatch, H200, busy=90.0, speedup=0.8)
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out", "--junit-xml=junit.xml")
    return pytester.path / "out"


# -- report.json ------------------------------------------------------------------------------------------------------


def test_a_session_writes_a_report_that_is_read_again(session):
    assert {path.name for path in session.iterdir()} == {"journal.jsonl", "report.json", "summary.md", "index.html"}
    report = read_report(session)
    evidence = [row.evidence for row in report.entries.values()]
    assert any(curve.bf16 and len(curve.bf16) == len(curve.fp8) for each in evidence for curve in each.curves)
    assert any(
        cells["fprop"].startswith("fp8") for each in evidence for cells in each.layers.values() if "fprop" in cells
    )
    assert {"build", "blocks", "layers"} <= set(report.durations["waited"]["tiny-bf16"])
    told = (session / "report.json").read_text()
    assert write_report(session, report).read_text() == told
    text = (session.parent / "junit.xml").read_text()
    assert '<property name="fp8_headline" value="' in text


def test_numbers_that_are_not_finite_are_null():
    assert finite({"a": [math.nan, 1.0, (math.inf,)], "b": "nan"}) == {"a": [None, 1.0, [None]], "b": "nan"}


def refusal_of(path):
    try:
        read_report(path)
    except Fp8Error as error:
        return [error.headline]
    return []


def test_a_mutated_journal_is_drawn_or_refused_in_one_line(tmp_path):
    path, refused = write_journal(tmp_path, report_of(case_of())), []
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        for _, data in mutants(line.decode(), COUNT // len(lines), seed=place):
            path.write_bytes(b"".join([*lines[:place], data, b"\n", *lines[place + 1 :]]))
            refused += refusal_of(path) or [render("x", read_report(path))][:0]
    assert len(refused) > COUNT / 4
    assert all(headline.isprintable() and len(headline) <= 500 for headline in refused)


@pytest.mark.parametrize(
    "text", ["", "[]\n", "{}\n", '{"schema": true}\n', '{"kind": "Answer"}\n', '{"schema": NaN}\n', "\x00\n"]
)
def test_what_is_no_journal_is_refused_and_writes_nothing(tmp_path, capsys, text):
    (tmp_path / "journal.jsonl").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{R.NOT_A_REPORT}: ")
    assert said.count("\n") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert main(["report", "nope"]) == 2


def test_a_journal_of_another_schema_is_refused(tmp_path):
    path = write_journal(tmp_path, report_of())
    path.write_text(path.read_text().replace(f'"schema": {SCHEMA}', '"schema": 1'))
    assert f"does not begin with schema {SCHEMA}" in refusal_of(path)[0]


def test_properties_hold_the_last_code_and_headline():
    asked = [said("layers", "FAIL", code="FP8-L03"), said("loss")]
    assert dict(properties("c", "FAIL", asked)) == {
        "fp8_case": "c",
        "fp8_verdict": "FAIL",
        "fp8_code": "FP8-L03",
        "fp8_headline": "PASS it is",
    }


# -- beside it --------------------------------------------------------------------------------------------------------


def test_github_s_summary_is_appended_to_and_what_cannot_be_written_is_a_note(tmp_path):
    step = tmp_path / "step.md"
    step.write_text("before\n")
    _, notes = write_beside(tmp_path, report_of(case_of()), {"GITHUB_STEP_SUMMARY": str(step)})
    assert not notes
    assert step.read_text() == "before\n" + (tmp_path / "summary.md").read_text()
    _, [note] = write_beside(tmp_path, report_of(), {"GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "folder")})
    assert note.startswith(f"the summary was not added to GITHUB_STEP_SUMMARY={tmp_path}")


# -- the page ---------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag of a page with its attributes, every id, and what is left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.open = [], [], []
        self.feed(text)
        assert not self.open
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(*rows, **changed):
    return render("a", report_of(*rows, **changed))


def test_one_file_without_network_and_scripts_that_links_to_the_documentation():
    text = page(case_of("c", said("faster", "FAIL", code="FP8-S09"), evidence=Evidence()))
    read = Tags(text)
    assert not {"script", "iframe", "img", "object", "link"} & {tag for tag, _ in read.tags}
    links = {a[name] for _, a in read.tags for name in ("href", "src", "xlink:href") if name in a}
    assert {link for link in links if link[1:] not in read.ids} == {
        documentation("codes.md") + "#fp8-s09-costs-more-than-it-saves",
        documentation("codes.md"),
        documentation("verdicts.md"),
    }
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_a_case_has_its_charts_figures_and_layers():
    text = page(case_of())
    assert text.count("<figure>") == 2
    assert "baseline 1.120x" in text
    assert "margin of the end" in text
    assert f'<td class="n">{NAME}</td><td class="n">fp8 28.5 dB (28.6)</td>' in text
    assert re.findall("<th>(.*?)</th>", text)[-3:] == ["layer", "fprop", "gradient off BF16 (limit)"], "none is empty"
    assert '<td class="n">0.08 (&lt;0.25)</td>' in text


def test_a_baseline_of_busy_time_is_not_drawn_beside_step_times():
    numbers = {"speedup": 1.13, "low": 1.12, "high": 1.14, "baseline": 1.12}
    text = page(case_of("c", said("speedup", **numbers, on_busy=True, gated_speedup=1.185, gated_baseline=1.19)))
    assert "baseline 1.120x" not in text
    assert "the baseline is one of busy time" in text
    assert "1.130x (1.190 busy)" in text
    assert "1.185x busy" in text


def test_the_top_says_what_ran_what_did_not_and_where_the_time_went():
    text = page(
        *(case_of("a"), case_of("b")),
        waited={"1b-bf16": {"build": 30.0, "curve": 0.1}},
        open_tests={"b": map(str, range(4)), "8b": map(str, range(44))},
        not_run={"needs 2 GPUs": ["x"]},
        problems=["nothing timed"],
    )
    top = text[text.index("<h1>") : text.index("<h2>Cases")]
    assert "not finished: 48 test(s) of 2 case(s) were not run, or not to their end: b, 8b" in top
    assert "nothing timed" in top
    assert "1 not run: needs 2 GPUs" in top
    assert '<td>1b-bf16</td><td class="n">30</td><td class="t">build 30 </td>' in top
    assert re.findall(r'class="v (\w+)"', top)[:2] == ["UNFINISHED", "PASS"]


def test_what_needs_a_look_is_open_coloured_and_comes_first():
    rows = [
        case_of("d-passes"),
        case_of("c-slower", said("speedup", speedup=0.9, low=0.8, high=0.95)),
        case_of("b-disturbed", said("loss", "INVALID", gap=1.0, margin=0.1)),
        case_of("a-fails", said("faster", "FAIL", "FAIL: slow\n  cause:    a cast\n  next:     fuse it")),
    ]
    text = page(*rows)
    assert re.findall(r'<details class="case (\w+)"( open)?>\n<summary>(\S+)', text) == [
        ("FAIL", " open", "a-fails"),
        ("INVALID", " open", "b-disturbed"),
        ("PASS", "", "d-passes"),
        ("SLOWER", " open", "c-slower"),
    ]
    assert '<span class="l">  next:     fuse it</span>' in text
    assert '<span class="INVALID">+1.0000 (&lt;0.100)</span>' in text
    assert "gradients" not in text.partition("<h2>Cases")[0], "no column without an answer"


def test_an_arm_s_error_has_its_code_s_page_its_cause_and_what_to_do():
    message = "FP8-R05: it died\n  cause:    memory\n  next:     a smaller batch"
    died = replace(said("numerics", "ERROR", message, R.ARM_DIED), headline="FP8-R05: it died")
    text = page(case_of("c", said("layers"), died))
    assert f'"{documentation("codes.md")}#fp8-r05-' in text
    assert '<span class="l">  cause:    memory</span><span class="l">  next:     a smaller batch</span>' in text
    assert '<span class="v ERROR">ERROR</span> <span class="ERROR">-</span>' in text.partition("<h2>Cases")[0]


def test_hostile_text_is_escaped_wherever_it_stands():
    bad = replace(said(HOSTILE, x=HOSTILE), code=HOSTILE, headline=HOSTILE, message=f"x\n{HOSTILE}")
    failed = replace(bad, verdict="ERROR")
    text = page(
        case_of(HOSTILE, bad, failed, gpu=HOSTILE),
        not_run={HOSTILE: [HOSTILE]},
        problems=[HOSTILE],
        waited={HOSTILE: {HOSTILE: 9.0}},
    )
    read = Tags(text)
    assert "script" not in {tag for tag, _ in read.tags}
    assert "{{ 7 * 7 }}" in text
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)


@pytest.mark.parametrize(
    "changed",
    [
        {"timing": {"processes": 7}},
        {"timing": {"processes": [{"bf16": ["x"], "fp8": [1]}]}, "evidence": Evidence()},
        {"evidence": Evidence([Curve(0, [1e308, -1e308], [-1e308, 1e308])]), "timing": {}},
    ],
)
def test_figures_that_no_axis_can_show_leave_a_chart_out(changed):
    answers = said("loss", gap="x", margin=None), said("memory", ratio=[1])
    assert page(case_of("c", *answers, **changed)).endswith("</html>\n")
