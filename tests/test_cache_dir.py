"""``--fp8-cache-dir``: where arms keep what they compile, for as long as the session lasts."""

from __future__ import annotations

import os

from helpers.fakes import H100, FakeProcess, install

SUITE = """
    import pytest

    @pytest.mark.fp8(model="tiny", backend="torchao", recipe="tensorwise")
    def test_mine(fp8_pair):
        fp8_pair.memory_evidence()
"""
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def seen_by_arms(pytester, monkeypatch, *options):
    install(monkeypatch, H100)
    seen = []
    begin = FakeProcess.start_build

    def note(self, spec):
        seen.append([os.environ.get(name) for name in VARIABLES])
        begin(self, spec)

    monkeypatch.setattr(FakeProcess, "start_build", note)
    pytester.makepyfile(SUITE)
    pytester.runpytest("--fp8-gpu=h100", *options).assert_outcomes(passed=1)
    return seen[0]


def test_arms_compile_into_the_folder_and_the_variables_are_put_back(pytester, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = pytester.path / "kept"
    assert seen_by_arms(pytester, monkeypatch, "--fp8-cache-dir=kept") == [f"{folder}/inductor", f"{folder}/triton"]
    assert [os.environ.get(name) for name in VARIABLES] == [None, "mine"]


def test_without_the_option_they_are_left_alone(pytester, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    assert seen_by_arms(pytester, monkeypatch)[1] == "mine"
