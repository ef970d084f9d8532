"""The page: one file without network, hostile text escaped, one case and two hundred, one report and several."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from unittest import mock

import pytest

from helpers.report_data import HOSTILE, decision, entry_of, report_of
from pytest_fp8.cli import main
from pytest_fp8.codes import R
from pytest_fp8.report.reading import check, schema

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


def page(folder, *reports):
    """The page of reports, as the command line makes it."""
    paths = []
    for index, report in enumerate(reports):
        check(report, schema(), "the report")
        paths.append(folder / str(index))
        paths[-1].mkdir()
        (paths[-1] / "report.json").write_text(json.dumps(report))
    assert main(["report", *map(str, paths)]) == 0
    return (paths[-1] / "index.html").read_text()


class Tags(HTMLParser):
    """Every tag of a page with its attributes, every id, and what is left open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.open = [], [], []
        self.feed(text)

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


def test_one_file_without_network_and_scripts(tmp_path):
    text = page(tmp_path, report_of(entry_of()))
    read = Tags(text)
    assert not read.open
    assert len(read.ids) == len(set(read.ids))
    assert not {"script", "iframe", "img", "object", "link"} & {tag for tag, _ in read.tags}
    links = [a[name] for _, a in read.tags for name in ("href", "src", "xlink:href") if name in a]
    assert all(link.startswith("#") and link[1:] in read.ids for link in links)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"#0a0b[0-9a-f]{2}", text), "a colour that is no variable"


def test_every_picture_has_its_numbers(tmp_path):
    text = page(tmp_path, report_of(entry_of()))
    read = Tags(text)
    assert sum(tag == "svg" for tag, _ in read.tags) == 6
    assert text.count('<pre class="data">') == 6
    assert "0\t1\t5\t5" in text
    assert "model.layers.0.mlp\tfp8\t28.5\t28.6" in text


def test_the_kernels_that_casts_take_are_named_below_the_waterfall(tmp_path):
    text = page(tmp_path, report_of(entry_of()))
    assert "abs_max&lt;BFloat16&gt; takes the most more than in BF16, 9.5 ms" in text
    assert "longer than in BF16\tabs_max&lt;BFloat16&gt;\t9.5" in text
    assert "\trelu\t" not in text, "an entry without its time"


def test_a_baseline_of_busy_time_is_not_drawn_beside_step_times(tmp_path):
    entry = entry_of()
    assert "baseline 1.120x" in page(tmp_path, report_of(entry))
    entry["decisions"]["speedup"]["numbers"] |= {"on_busy": True, "gated_speedup": 1.185}
    (tmp_path / "busy").mkdir()
    text = page(tmp_path / "busy", report_of(entry))
    assert "baseline 1.120x" not in text
    assert "the baseline is one of busy time" in text
    assert ";<br>1.185x busy</td>" in text, "the speedup that was judged, beside that of steps"
    assert ">1.120x</td>" in text, "an earlier version's report has no other"
    entry["decisions"]["speedup"]["numbers"]["gated_baseline"] = 1.19
    (tmp_path / "stored").mkdir()
    text = page(tmp_path / "stored", report_of(entry))
    assert ">1.190x busy</td>" in text
    assert ">1.120x</td>" not in text
    assert "The baseline&#39;s sessions" not in text, "they have no busy time"
    entry["evidence"]["history"][0]["busy_speedup"] = 1.18
    (tmp_path / "quiet").mkdir()
    assert "The baseline&#39;s sessions and this one: busy speedup" in page(tmp_path / "quiet", report_of(entry))


def test_what_failed_comes_first_and_says_what_to_do(tmp_path):
    failed = decision("FAIL", "FAIL: slow\n  cause:    a cast\n  next:     fuse it")
    text = page(tmp_path, report_of(entry_of("b"), entry_of("a-fails", decisions={"faster": failed})))
    assert text.index(">a-fails<") < text.index(">b<")
    assert "next:     fuse it" in text


@pytest.mark.parametrize("notes", [["judged by busy time"], "not a list", 7])
def test_what_a_pass_names_besides_stands_below_it(tmp_path, notes):
    passed = decision(notes=notes)
    text = page(tmp_path, report_of(entry_of("a", decisions={"speedup": passed})))
    assert ("judged by busy time" in text) is isinstance(notes, list)


def test_hostile_text_is_escaped_wherever_it_stands(tmp_path):
    def poisoned(value):
        if isinstance(value, dict):
            return {name: poisoned(item) for name, item in value.items()}
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        return HOSTILE if isinstance(value, str) and value not in ("PASS", "INVALID") else value

    bad = poisoned(entry_of())
    bad |= {"errors": [HOSTILE], "expected": [HOSTILE], "asserted": []}
    bad["case_hash"] = "0"
    report = report_of(bad, reason=HOSTILE)
    report["not_run"] = {HOSTILE: [HOSTILE]}
    for part in report["entries"].values():
        for each in part["evidence"]["history"]:
            each |= {"date": HOSTILE[:40], "commit": HOSTILE[:80]}
    text = page(tmp_path, report)
    read = Tags(text)
    assert not read.open
    assert "script" not in {tag for tag, _ in read.tags}
    assert "{{ 7 * 7 }}" in text
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)


@pytest.mark.nightly
def test_two_hundred_cases_with_long_names(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_fp8.report.page.view.PICTURED", 5)
    names = [f"{index}-" + "a-very-long-name-" * 20 for index in range(200)]
    text = page(tmp_path, report_of(*(entry_of(name) for name in names)))
    assert all(text.count(f">{name}<") == 1 for name in names)
    assert "Pictures are drawn for the 5 cases" in text
    assert text.count("<svg") == 5 * 6


def test_a_run_that_did_not_finish_says_so_at_the_top_and_is_not_all_green(tmp_path):
    report = report_of(entry_of("a"), entry_of("b", open_tests=4))
    report |= {"finished": False, "open_tests": {"b": ["t"] * 4, "8b": ["t"] * 44}, "problems": ["nothing timed"]}
    text = page(tmp_path, report)
    top = text[text.index("<h1>") : text.index("<table>")]
    assert "not finished: 48 test(s) of 2 case(s) were not run, or not to their end: b, 8b" in top
    assert "nothing timed" in top
    assert re.findall(r'class="v (\w+)"', top) == ["UNFINISHED", "PASS"]


def test_a_report_of_an_earlier_version_has_its_page(tmp_path):
    assert "not finished" not in page(tmp_path, report_of(entry_of()))


def test_a_line_of_a_message_hangs_below_its_label(tmp_path):
    failed = decision("FAIL", "FAIL: slow\n  cause:    a cast\n  next:     fuse it")
    text = page(tmp_path, report_of(entry_of(decisions={"faster": failed})))
    assert '<span class="l">  next:     fuse it</span>' in text


def test_several_reports_stand_beside_each_other(tmp_path):
    slower = copy.deepcopy(entry_of())
    slower["decisions"]["speedup"] |= {"verdict": "FAIL"}
    slower["decisions"]["speedup"]["numbers"] |= {"speedup": 1.05}
    text = page(tmp_path, report_of(entry_of(), entry_of("gone")), report_of(slower))
    assert "Over the reports" in text
    assert "Speedup in each report" in text
    assert "1.130x" in text
    assert "1.050x" in text
    assert ">gone<" in text


def test_numbers_of_another_kind_leave_a_dash(tmp_path):
    odd = decision(gap="x", margin=None, speedup=[1], account=3, phases=7)
    entry = entry_of(decisions={"loss": odd, "speedup": odd, "memory": odd}, timing={}, evidence={})
    assert "<svg" not in page(tmp_path, report_of(entry))


def test_numbers_that_no_axis_can_show_leave_a_picture_out(tmp_path):
    entry = entry_of(evidence={"curves": [{"seed": 0, "bf16": [1e308, -1e308], "fp8": [-1e308, 1e308]}]})
    assert page(tmp_path, report_of(entry)).endswith("</html>\n")


def test_a_broken_report_is_refused(tmp_path, capsys):
    (tmp_path / "report.json").write_text('{"schema": 1}')
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is no report of this pytest-fp8: the report lacks entries" in said
    assert said.count("\n") == 2
    assert not (tmp_path / "index.html").exists()


def test_without_the_extra_the_command_names_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pytest_fp8.report.page.write.EXTRA", ("jinja2", "no_such_module"))
    (tmp_path / "report.json").write_text(json.dumps(report_of(entry_of())))
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'pytest-fp8[report]'" in capsys.readouterr().err


def test_the_command_line_loads_neither_before_it_needs_them():
    code = "import sys, pytest_fp8.cli; pytest_fp8.cli.parser(); print({'jinja2', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_page_goes_into_a_pipe_or_through_a_link_and_leaves_both(tmp_path):
    report, page, link, pipe = (tmp_path / name for name in ("report.json", "page.html", "link.html", "pipe"))
    report.write_text(json.dumps(report_of(entry_of())))
    link.symlink_to(page)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with mock.patch("pytest_fp8.report.page.write.render", return_value="a page"):
        assert [main(["report", str(report), "-o", str(target)]) for target in (link, pipe)] == [0, 0]
    assert os.read(reading, 99) == b"a page"
    os.close(reading)
    assert page.read_text() == "a page"
    assert link.is_symlink()
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("chosen", "folder", "meant"),
    [(("-o", "my out"), "my out", "my out/index.html"), ((), "run/index.html", "run/index.html/index.html")],
)
def test_a_folder_in_the_page_s_place_is_told_with_a_command_that_works(
    tmp_path, monkeypatch, capsys, chosen, folder, meant
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/report.json").write_text(json.dumps(report_of(entry_of())))
    (tmp_path / folder).mkdir()
    assert main(["report", "run", *chosen]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"{R.NOT_WRITABLE}: could not write {folder}: it is a folder"
    assert [line.split()[0] for line in said[1:]] == ["expected:", "seen:", "cause:", "next:"]
    assert ".tmp" not in "".join(said)
    offered = shlex.split(said[-1].split("next:")[1])
    with mock.patch("pytest_fp8.report.page.write.render", return_value="a page"):
        assert main(offered[1:]) == 0
    assert (tmp_path / meant).read_text() == "a page"
