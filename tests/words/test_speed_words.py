"""Every sentence of the speed question and of the comparison in one session, from evidence written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.steps import (
    BF16,
    FP8_ARM,
    asked,
    changed,
    gpu_step,
    on_half_the_rows,
    profiled,
    recorded_step,
    sessions,
    sleeping,
    travelling,
)
from pytest_fp8.codes import S
from pytest_fp8.compare import judge
from pytest_fp8.gpu import Conditions
from pytest_fp8.questions.speed.check import check_speedup
from pytest_fp8.questions.speed.evidence import TimingEvidence
from pytest_fp8.questions.speed.timing import Beside, Turn
from pytest_fp8.stats.looks import against_base

PLAIN = TimingEvidence([[100.0, 100.1] * 6] * 2, [[80.0, 80.1] * 6] * 2)
LAUNCHES = profiled(recorded_step("1b-transformer_engine-current"), 210.0, 120.0)
FLASH = {"efficient": ["fmha_cutlassF"]}, {"cudnn": ["cudnn_flash"]}


def plain(floor=None, bf16_ms=(), **changes):
    history = changes.pop("history", ())
    evidence = replace(PLAIN, **changes)
    return check_speedup(evidence, floor=floor, tolerance=0.02, history=history, baseline_reference_ms=bf16_ms)


def scattering():
    blocks = [114.0, 108.0, 101.0, 165.0, 186.0, 99.0, 97.0, 98.0, 157.0, 99.0, 101.0, 98.6]
    fp8 = profiled(recorded_step("1b-transformer_engine-delayed"), 97.0, 95.6)
    return check_speedup(
        TimingEvidence([[121.5] * 12] * 2, [blocks] * 2, bf16_step=BF16, fp8_step=fp8), floor=1.0, tolerance=0.02
    )


def slower_than_base(change):
    return judge(against_base([[change] * 10] * 6, 0.01), 0.01, True)


FOUND = {
    S.NO_BASELINE: plain,
    S.FASTER_THAN_BASELINE: lambda: plain(history=sessions(1.18)),
    S.SLOWER_THAN_BASELINE: lambda: plain(history=sessions(1.35)),
    S.LAUNCH_BOUND: lambda: asked(fp8=LAUNCHES, fp8_ms=206.0),
    S.SHORT_OF_MEMORY: lambda: sleeping(beside=Beside(turns=[Turn("BF16", steps=6, retries=12)])),
    S.NOT_COMPILED: lambda: plain(fp8=[[120.0, 120.1] * 6] * 2, fp8_compiled=False, floor=1.0),
    S.SLOW_WIRE: lambda: asked(travelling(BF16, 12.0, 8.0, 2.0), travelling(FP8_ARM, 32.0, 8.0, 22.0), 123.5, 128.0),
    S.COSTS_MORE_THAN_IT_SAVES: lambda: asked(floor=1.25),
    S.HOST_SCATTERS: scattering,
    S.SESSIONS_DIFFER: lambda: plain(history=sessions(1.27)),
    S.UNDECIDED: lambda: plain(fp8=[[99.0, 101.0] * 6, [101.0, 99.0] * 6], floor=1.0),
    S.OTHER_PROCESS: lambda: plain(beside=Beside([Conditions(strangers=(7,))])),
    S.THROTTLED: lambda: plain(beside=Beside([Conditions(1980)] * 9 + [Conditions(1200, ("hardware thermal",))] * 3)),
    S.OTHER_ATTENTION: lambda: plain(
        bf16_step=gpu_step({}, attention=FLASH[0]), fp8_step=gpu_step({}, attention=FLASH[1])
    ),
    S.OTHER_REFERENCE: lambda: plain(history=sessions(1.25), bf16_ms=[[88.0]]),
    S.NO_BUSY_TIMES: lambda: asked(fp8=LAUNCHES, fp8_ms=206.0, floor=None, history=sessions(0.8)),
    S.COMPILED_WHILE_TIMED: lambda: plain(beside=Beside(turns=[Turn("FP8", compilations=2)])),
    S.LESS_WORK: lambda: asked(fp8=on_half_the_rows(FP8_ARM, 8192), fp8_ms=60.0),
    S.REFERENCE_WAITS: sleeping,
    S.TOO_GOOD: lambda: asked(fp8=changed(FP8_ARM, rest=1.0), fp8_ms=80.0),
    S.SLOWER_THAN_BASE: lambda: slower_than_base(-0.05),
}
"""Code -> what asks for it."""


@pytest.mark.parametrize("code", FOUND, ids=lambda code: code.slug)
def test_words(code, snapshot):
    decision = FOUND[code]()
    assert decision.code is code, decision.message
    assert decision.message == snapshot


def test_every_code_has_its_words_here():
    assert set(FOUND) == set(S)
