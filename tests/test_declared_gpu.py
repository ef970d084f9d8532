"""A GPU that is declared, found or missing: which tests run on it, which are skipped, and what the session says."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.fakes import A100, B200, H100, H200, L40S, SUITE, install
from helpers.sessions import CHECKPOINTS
from pytest_fp8 import Case
from pytest_fp8.options import Settings
from pytest_fp8.pairs import Pairs
from pytest_fp8.report.record import Notes


@pytest.fixture
def suite(pytester):
    pytester.makepyfile(SUITE + CHECKPOINTS)
    return pytester


@pytest.mark.parametrize(
    ("gpu", "says"), [(None, "no NVIDIA GPU"), (H100, "this is NVIDIA H100"), (A100, "this is NVIDIA A100")]
)
def test_a_declared_gpu_that_is_not_there_skips_and_fails_the_session(suite, monkeypatch, gpu, says):
    install(monkeypatch, gpu)
    result = suite.runpytest("--fp8-gpu=h200", "-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"*--fp8-gpu=h200 was declared; {says}*", "*A gate that ran nothing is not green*"])


@pytest.mark.parametrize("gpu", [None, A100])
def test_auto_skips_with_the_reason_and_stays_green(suite, monkeypatch, gpu):
    install(monkeypatch, gpu)
    result = suite.runpytest("-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*needs a GPU with FP8 tensor cores*"])


MARKED = """
    import pytest
    from pytest_fp8 import Case

    @pytest.mark.fp8({})
    def test_layers(fp8_pair):
        fp8_pair.assert_layers()
"""
TINY = "Case('tiny', 'torchao', 'tensorwise'"


@pytest.mark.nightly_beyond(2)
@pytest.mark.parametrize("gpu", [B200, L40S, H100], ids=["b200", "l40s", "h100"])
@pytest.mark.parametrize("declared", [True, False])
def test_a_mark_that_names_no_chip_runs_on_each_gpu_that_its_recipe_runs_on(pytester, monkeypatch, gpu, declared):
    install(monkeypatch, gpu)
    pytester.makepyfile(MARKED.format(f"cases=[{TINY})]"))
    result = pytester.runpytest(*[f"--fp8-gpu={gpu.key}"] * declared)
    result.assert_outcomes(passed=1)


def test_of_two_marks_that_differ_in_their_chip_the_one_for_this_gpu_counts(pytester, monkeypatch):
    """Here the emulated test is skipped, since another one asks the GPU: the first mark does, the second does not."""
    install(monkeypatch, L40S)
    pytester.makepyfile(
        f"""
        import pytest

        from pytest_fp8 import Case

        @pytest.mark.fp8(cases=[{TINY}, chip="hopper")])
        def test_on_hopper(fp8_pair): ...

        @pytest.mark.fp8(cases=[{TINY}, chip="ada")])
        def test_on_ada(fp8_pair):
            fp8_pair.assert_layers()

        @pytest.mark.fp8(cases=[{TINY}, emulated=True)])
        def test_emulated(fp8_pair): ...
        """
    )
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["*emulated: other tests of this session ask the NVIDIA L40S itself*"])


def test_cases_that_are_skipped_here_share_no_false_alarms(monkeypatch):
    install(monkeypatch, H100)
    here = Case("1b", "torchao", "tensorwise")
    elsewhere = [Case("1b", "te", "mxfp8", seq=1024 + index) for index in range(19)]
    pairs = Pairs(Settings(gpu="h100"), Path(), Notes(), "", ExitStack())
    pairs.collected([(case, "speedup") for case in (here, *elsewhere)])
    assert pairs.gated_cases == 1


def test_a_missing_library_fails_on_a_declared_gpu_and_skips_otherwise(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.recipes.BackendFacts.available", lambda self: (False, f"{self.name} is missing"))
    declared = suite.runpytest("--fp8-gpu=h200")
    declared.assert_outcomes(errors=12)
    declared.stdout.fnmatch_lines(["*torchao is missing*"])
    auto = suite.runpytest("-rs")
    auto.assert_outcomes(skipped=12)
    auto.stdout.fnmatch_lines(["*torchao is missing*"])


def test_a_recipe_the_chip_cannot_do_fails_on_a_declared_gpu(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(
        """
        import pytest
        from pytest_fp8 import Case
        @pytest.mark.fp8(cases=[Case("tiny", "transformer_engine", "mxfp8")])
        def test_layers(fp8_pair): ...
        """
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*recipe 'mxfp8' of transformer_engine needs compute capability 10.0*9.0*"])


EMULATED = f"@pytest.mark.fp8(cases=[{TINY}, emulated=True)])\ndef test_emulated(fp8_pair): fp8_pair.assert_layers()\n"

ASKS_GPU = f"@pytest.mark.fp8(cases=[{TINY})])\ndef test_on_it(fp8_pair): fp8_pair.assert_layers()\n"


def test_emulated_tests_run_on_a_machine_with_a_gpu_that_no_test_asks(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(f"import pytest\nfrom pytest_fp8 import Case\n{EMULATED}{ASKS_GPU}")
    alone = pytester.runpytest("-k", "not test_on_it")
    alone.assert_outcomes(passed=1, deselected=1)
    both = pytester.runpytest("-rs")
    both.assert_outcomes(passed=1, skipped=1)
    both.stdout.fnmatch_lines(["SKIP* emulated: other tests of this session ask the NVIDIA H200 itself"])
    declared = pytester.runpytest("-rs", "--fp8-gpu=h200", "-k", "not test_on_it")
    declared.assert_outcomes(skipped=1, deselected=1)
    assert declared.ret == 1
    declared.stdout.fnmatch_lines(["SKIP*--fp8-gpu=h200 was declared, and an emulated test asks nothing of it"])


def test_without_a_gpu_a_session_that_asked_nothing_says_why_and_how_to_go_on(pytester, monkeypatch):
    install(monkeypatch, None)
    pytester.makepyfile("import pytest\n@pytest.mark.fp8\ndef test_mine(fp8_pair): ...")
    result = pytester.runpytest()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["=* FP8 *=", "1 not run: needs a GPU with FP8 *: no NVIDIA GPU (fake); emulated=True in*"]
    )
