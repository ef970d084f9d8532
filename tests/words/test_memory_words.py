"""Every sentence of the memory question."""

from __future__ import annotations

import pytest

from pytest_fp8.codes import M
from pytest_fp8.questions.memory import MemoryEvidence, Peak, StepMemory, check_memory

GIB = 2**30
STORED = {M.NO_BASELINE: None, M.MORE_MEMORY: 0.8, M.LESS_MEMORY: 1.0}


def step(peak):
    return StepMemory(GIB, {"forward": Peak(peak, peak)}, peak_allocated=peak, peak_reserved=peak)


@pytest.mark.parametrize("code", M, ids=lambda code: code.slug)
def test_words(code, snapshot):
    decision = check_memory(MemoryEvidence(step(10 * GIB), step(9 * GIB)), STORED[code])
    assert decision.code is code
    assert decision.message == snapshot
