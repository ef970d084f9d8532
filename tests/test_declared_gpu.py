"""A GPU that is declared, found or missing: which tests run on it, which are skipped, and what the session says."""

from __future__ import annotations

import pytest

from helpers.fakes import A100, B200, H100, H200, SUITE, install
from helpers.sessions import CHECKPOINTS


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


def test_a_declared_family_fits_any_of_its_gpus(suite, monkeypatch):
    install(monkeypatch, H100)
    assert suite.runpytest("--fp8-gpu=hopper").ret == 0


@pytest.mark.parametrize("gpu", [None, A100])
def test_auto_skips_with_the_reason_and_stays_green(suite, monkeypatch, gpu):
    install(monkeypatch, gpu)
    result = suite.runpytest("-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*needs a hopper GPU*"])


def test_a_case_for_another_chip_says_so(suite, monkeypatch):
    install(monkeypatch, B200)
    result = suite.runpytest("--fp8-gpu=b200", "-rs")
    result.assert_outcomes(skipped=12)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*is for hopper; NVIDIA B200 is blackwell*"])


def test_a_missing_library_fails_on_a_declared_gpu_and_skips_otherwise(suite, monkeypatch):
    install(monkeypatch, H200)
    monkeypatch.setattr("pytest_fp8.backends.base.Backend.available", lambda self: (False, f"{self.name} is missing"))
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
        @pytest.mark.fp8(model="tiny", backend="transformer_engine", recipe="mxfp8")
        def test_layers(fp8_pair): ...
        """
    )
    result = pytester.runpytest("--fp8-gpu=h200")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*recipe 'mxfp8' of transformer_engine needs compute capability 10.0*9.0*"])


EMULATED = "@pytest.mark.fp8(model='tiny', emulated=True)\ndef test_emulated(fp8_pair): fp8_pair.assert_layers()\n"

ASKS_GPU = "@pytest.mark.fp8(model='tiny')\ndef test_on_it(fp8_pair): fp8_pair.assert_layers()\n"


def test_emulated_tests_run_on_a_machine_with_a_gpu_that_no_test_asks(pytester, monkeypatch):
    install(monkeypatch, H200)
    pytester.makepyfile(f"import pytest\n{EMULATED}{ASKS_GPU}")
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
    result.stdout.fnmatch_lines(["=* FP8 *=", "1 not run: needs a hopper GPU: no NVIDIA GPU (fake); emulated=True in*"])


@pytest.mark.slow
def test_under_xdist_the_controller_has_the_whole_table(suite, monkeypatch):
    pytest.importorskip("xdist")
    install(monkeypatch, None)
    result = suite.runpytest("-n2", "--fp8-gpu=h200")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*12 not run: --fp8-gpu=h200 was declared*"])
