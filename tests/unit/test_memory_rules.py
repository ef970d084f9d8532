"""The memory question's check on peaks written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.evidence import verdict_of
from pytest_fp8 import Verdict
from pytest_fp8.codes import M
from pytest_fp8.questions.memory import MemoryEvidence, StepMemory, check_memory


def memory(peak, resident=50, phase="forward"):
    return StepMemory(resident, {phase: peak}, peak_allocated=peak, peak_reserved=peak)


def test_memory():
    evidence = MemoryEvidence(bf16=memory(100), fp8=memory(90))
    verdict_of(check_memory(evidence, 0.9), Verdict.PASS)
    verdict_of(check_memory(evidence), Verdict.NOT_EXERCISED)
    large = check_memory(MemoryEvidence(bf16=memory(10 * 2**30), fp8=memory(9 * 2**30)), 0.9)
    assert [large.numbers[f"{arm}_peak_gib"] for arm in ("bf16", "fp8")] == [10.0, 9.0]
    assert "FP8 9.00 GiB (in forward), BF16 10.00 GiB" in large.message
    verdict_of(check_memory(replace(evidence, fp8=memory(80)), 0.9), Verdict.IMPROVED, M.LESS_MEMORY)
    verdict_of(check_memory(replace(evidence, fp8=memory(166)), 0.9), Verdict.FAIL, M.MORE_MEMORY)


def test_activations_are_described_and_decide_nothing():
    less = check_memory(MemoryEvidence(bf16=memory(100), fp8=memory(90, resident=70)), 0.9)
    verdict_of(less, Verdict.PASS)
    assert less.numbers["activation_ratio"] == pytest.approx(20 / 50)
    no_forward = memory(90, phase="backward")
    assert check_memory(MemoryEvidence(memory(100), no_forward), 0.9).figures.activation_ratio is None


def test_the_peaks_differ_for_a_reason():
    gib = 2**30
    bf16 = replace(memory(10 * gib), peak_reserved=12 * gib, kinds={"weights": 4 * gib, "activations": 6 * gib})
    kinds = {"weights": 4 * gib, "activations": 3 * gib, "FP8 copies": gib, "other": gib // 16}
    fp8 = replace(memory(int(8.0625 * gib)), kinds=kinds)
    decision = check_memory(MemoryEvidence(bf16, fp8), 0.8)
    assert "at the peaks: activations -3.00 GiB, FP8 copies +1.00 GiB;" in decision.message
    for told, arm in (("kinds", "fp8"), ("bf16_kinds", "bf16")):
        gibs = dict(decision.numbers[told])
        cache = gibs.pop("cache")
        assert sum(gibs.values()) == pytest.approx(decision.numbers[f"{arm}_peak_gib"])
    assert cache == 2.0
    assert "no kind by 1% of BF16's" in check_memory(MemoryEvidence(bf16, bf16), 1.0).message
    assert "at the peaks" not in check_memory(MemoryEvidence(bf16, memory(gib)), 1.0).message
