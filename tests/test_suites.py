"""The suite's own tests on fake arms: what a GPU cannot hold is skipped with the bytes that are missing."""

from __future__ import annotations

from pathlib import Path

from helpers.fakes import H100, H200, install

SUITES = Path(__file__).parent.parent / "suites"


def asked(pytester, *options):
    """The layers of 8B in Transformer Engine and torchao, asked in a process of its own folder."""
    questions = SUITES / "test_questions.py"
    tests = [f"{questions}::test_layers[{case}]" for case in ("8b-te-delayed", "8b-torchao-tensorwise")]
    # Neither the report that the repository's ini file names, nor its baselines: fake arms have two layers.
    options = ("--fp8-report=", "--fp8-baselines=none", *options)
    return pytester.runpytest("-p", "no:cacheprovider", *tests, *options)


def test_an_arm_that_the_gpu_cannot_hold_is_skipped_with_what_is_missing(pytester, monkeypatch):
    world = install(monkeypatch, H100)
    result = asked(pytester, "--fp8-gpu=h100", "-rs")
    result.stdout.fnmatch_lines(["*SKIPPED*8b-te-delayed takes 80 to 83 GiB at its peak, and this GPU has 79*"])
    assert result.parseoutcomes()["skipped"] == 1
    assert set(world.built) == {"8b-bf16", "8b-torchao-tensorwise"}


def test_a_gpu_that_holds_it_is_asked(pytester, monkeypatch):
    world = install(monkeypatch, H200)
    result = asked(pytester, "--fp8-gpu=h200")
    assert "skipped" not in result.parseoutcomes()
    assert "8b-te-delayed" in world.built
