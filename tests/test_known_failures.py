"""What fails as known, in a run's report: said beside the case's verdict, never in its place or for another failure."""

from __future__ import annotations

import json

import pytest

from helpers.fakes import H200, install
from helpers.told import Told
from pytest_fp8.codes import L, R
from pytest_fp8.verdicts import Decision, Verdict

HEAD = """
import pytest
from pytest_fp8 import Case

CASE = dict(cases=[Case("tiny", "torchao", "rowwise")])
OTHER = dict(cases=[Case("tiny", "torchao", "tensorwise")])
KNOWN = pytest.mark.xfail(reason="somelib 1.2: leaves its backward in BF16")

@pytest.fixture
def checked(fp8_pair):
    fp8_pair.assert_layers()
    return fp8_pair

@pytest.mark.fp8(**CASE, question="loss")
def test_loss(fp8_pair):
    fp8_pair.assert_loss()
"""
LAYERS = """
@KNOWN
@pytest.mark.fp8(**CASE, question="layers")
def test_layers(fp8_pair):
    fp8_pair.assert_layers()
"""


@pytest.fixture
def files(pytester, monkeypatch):
    """What a run of these tests, with these changes of its arms, ends with: its result, report, summary and page."""

    def run(*tests, **world):
        install(monkeypatch, H200, **{"executed_roles": ("fprop",), **world})
        pytester.makepyfile(HEAD + "".join(tests))
        result, out = pytester.runpytest("--fp8-gpu=h200", "--fp8-report=out"), pytester.path / "out"
        assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        report, summary, page = ((out / name).read_text() for name in ("report.json", "summary.md", "index.html"))
        return result, json.loads(report), summary, page

    return run


@pytest.mark.oldest
def test_a_known_failure_stands_beside_the_verdict_of_what_else_was_asked(files):
    _, report, summary, html = files(LAYERS)
    assert report["entries"]["tiny-torchao-rowwise"]["known"] == ["layers"]
    assert summary.splitlines()[0] == "## FP8: 1 PASS"
    assert "| tiny-torchao-rowwise | PASS; fails as known: layers |" in summary
    assert "**tiny-torchao-rowwise**, layers, as known" in summary, "what it says is still there"
    assert f'<code>{L.DGRAD_NOT_IN_FP8}</code></a> <span class="soft">as known</span>' in html
    assert '<span class="v PASS">PASS</span> <span class="soft">fails as known: layers</span>' in html


def test_another_failure_of_the_same_case_is_not_called_known(files):
    _, _, summary, html = files(LAYERS, nan_at=3)
    assert summary.splitlines()[0] == "## FP8: 1 FAIL"
    assert "| tiny-torchao-rowwise | FAIL; fails as known: layers |" in summary
    assert '<details class="case FAIL" open>' in html


def test_a_case_of_which_all_fails_as_known_is_counted_by_itself(files):
    other = LAYERS.replace("test_layers", "test_other").replace("**CASE", "**OTHER")
    _, _, summary, html = files(other)
    assert summary.splitlines()[0] == "## FP8: 1 FAIL as known, 1 PASS"
    assert '<span class="v FAIL">FAIL</span> <span class="soft">as known</span> 1' in html


def test_a_test_that_asks_nothing_before_it_fails_is_said_to(files):
    slow = """
@pytest.mark.fp8(**CASE, question="speedup")
def test_faster(fp8_pair):
    pytest.xfail("this host is slow")
"""
    _, _, summary, _ = files(slow)
    assert "| tiny-torchao-rowwise | PASS; a test fails as known |" in summary


SAME_QUESTION = LAYERS.replace("@KNOWN\n", "").replace("test_layers", "test_again")
IN_SET_UP = """
@pytest.mark.fp8(**CASE)
def test_in_set_up(checked): ...

@KNOWN
@pytest.mark.fp8(**OTHER, question="memory")
def test_neighbour(fp8_pair):
    assert fp8_pair.memory().numbers["ratio"] < 0.1
"""


@pytest.mark.parametrize(
    "tests",
    [(LAYERS, SAME_QUESTION), (SAME_QUESTION, LAYERS), (IN_SET_UP,), (LAYERS, IN_SET_UP)],
    ids=["before it", "after it", "in a set-up", "and in a set-up"],
)
def test_a_test_that_was_not_expected_to_fail_is_never_hidden(files, tests):
    result, report, summary, _ = files(*tests)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "layers" in report["entries"]["tiny-torchao-rowwise"]["failed"]
    assert "| tiny-torchao-rowwise | FAIL" in summary
    assert "fails as known: layers" not in summary


def test_a_later_look_at_the_question_changes_nothing(files):
    look = """
@pytest.mark.fp8(**CASE)
def test_look(fp8_pair):
    fp8_pair.layers()
    fp8_pair.assert_loss()
"""
    result, _, summary, _ = files(LAYERS, look)
    assert result.ret == 0
    assert "| tiny-torchao-rowwise | PASS; fails as known: layers |" in summary


@pytest.mark.parametrize(
    ("body", "said", "world"),
    [
        ("assert fp8_pair.layers().verdict.passes", "PASS; fails as known: layers", {}),
        ("fp8_pair.layers(); fp8_pair.loss(); assert False", "FAIL; a test fails as known", {"nan_at": 3}),
        ("fp8_pair.layers(); pytest.xfail('no')", "FAIL; a test fails as known", {}),
    ],
    ids=["its only failure", "one of several", "none of its own"],
)
def test_what_a_test_asserts_by_itself_is_known_where_it_is_plain_what(files, body, said, world):
    own = f"""
@KNOWN
@pytest.mark.fp8(**CASE)
def test_own(fp8_pair):
    {body}
"""
    assert f"| tiny-torchao-rowwise | {said} |" in files(own, **world)[2]


def test_an_answer_that_decides_nothing_is_never_known(files):
    """The session counts it: it has no answer on a declared GPU."""
    own = """
@KNOWN
@pytest.mark.fp8(**CASE)
def test_own(fp8_pair):
    fp8_pair.assert_speedup()
    assert False
"""
    _, _, summary, _ = files(own, strangers=(4242,), executed_roles=None)
    assert summary.splitlines()[0] == "## FP8: 1 INVALID"


@pytest.mark.parametrize("where", ["fp8_pair", "checked"])
def test_an_arm_that_fails_as_known_is_no_error_of_its_case(files, where):
    dies = f"""
@KNOWN
@pytest.mark.fp8(**OTHER)
def test_dies({where}):
    {where}.assert_layers()
"""
    result, report, summary, _ = files(dies, fails={"tiny-torchao-tensorwise": R.ARM_DIED})
    assert result.ret == 0
    told = f"{R.ARM_DIED}: the arm 'tiny-torchao-tensorwise on cuda' failed"
    assert report["entries"]["tiny-torchao-tensorwise"]["known"] == [told]
    assert summary.splitlines()[0] == "## FP8: 1 ERROR as known, 1 PASS"
    assert "**tiny-torchao-tensorwise**, an arm failed, as known" in summary
    again = dies.replace("@KNOWN\n", "").replace("test_dies", "test_dies_again")
    _, _, summary, _ = files(dies, again, fails={"tiny-torchao-tensorwise": R.ARM_DIED})
    assert summary.splitlines()[0] == "## FP8: 1 ERROR, 1 PASS"


def test_a_question_that_fails_as_known_and_otherwise_is_both_in_any_order():
    for order in (("known", "failed"), ("failed", "known"), ("known", "failed", "known")):
        told = Told()
        for ended in order:
            told.answer("case", Decision(L.NOTHING_CONVERTED, Verdict.FAIL, "no", question="layers"), ended=ended)
        [row] = told.entries.values()
        assert (row.known, row.failed) == (["layers"], ["layers"])


def test_the_reason_of_a_known_failure_is_one_line_of_plain_text(files):
    mark = "@pytest.mark.xfail(reason='a\\n::error::b \\x1b[31m' + 'c' * 5000, strict=True)\n"
    fails = f"""
{mark}@pytest.mark.fp8(**OTHER)
def test_dies(fp8_pair):
    fp8_pair.assert_layers()
"""
    _, report, _, _ = files(fails, fails={"tiny-torchao-tensorwise": R.ARM_DIED})
    [reason] = report["entries"]["tiny-torchao-tensorwise"]["expected"]
    assert reason.startswith("a ::error::b ")
    assert reason.isprintable()
    assert len(reason) <= 300
