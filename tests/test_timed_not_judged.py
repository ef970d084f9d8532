"""A session that ends between timing its arms and judging them tells what it has timed."""

import json

import pytest

from helpers.fakes import H200, FakeProcess, install

SUITE = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", questions=("layers", "speedup"))])
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()

    @pytest.mark.fp8(cases=[Case("tiny", "torchao", "rowwise", questions=("layers", "speedup"))])
    def test_speed(fp8_pair):
        fp8_pair.assert_faster()
"""


class Stopped(FakeProcess):
    """Somebody presses Ctrl-C while the first pair is profiled."""

    def layers(self):
        raise KeyboardInterrupt


@pytest.fixture
def suite(pytester, monkeypatch):
    install(monkeypatch, H200, speedup=1.25)
    pytester.makepyfile(SUITE)
    return pytester


def test_an_interrupted_session_tells_what_it_has_timed(suite, monkeypatch, capsys):
    monkeypatch.setattr("pytest_fp8.arms.pool.ArmProcess", Stopped)
    done = suite.inline_run("--fp8-gpu=h200", "--fp8-report=report", no_reraise_ctrlc=True)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    said = " ".join(capsys.readouterr().out.split())
    assert "timed and not judged: BF16 " in said
    assert "1.2" in said.partition("ms a step, ")[2][:4]
    assert "whether both did the same work was not compared" in said
    [entry] = json.loads((suite.path / "report" / "report.json").read_text())["entries"].values()
    [pair] = entry["timing"]["processes"]
    assert len(pair["bf16"]) == len(pair["fp8"]) > 0
    assert entry["decisions"] == {}


def test_one_that_judged_them_says_nothing_of_it(suite):
    result = suite.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*timed and not judged*")


def test_nor_does_one_that_was_not_asked_how_fast_it_is(suite):
    suite.runpytest("--fp8-gpu=h200", "-k", "test_layers").stdout.no_fnmatch_line("*timed and not judged*")
