"""A project with a suite and one stored baseline, in which `pytest-fp8 baselines` is called."""

from __future__ import annotations

from dataclasses import replace

from helpers.baselines import baseline as stored
from pytest_fp8 import Case
from pytest_fp8.baselines.store import write_baseline
from pytest_fp8.cli import main

SUITE = """
from pytest_fp8 import Case
ALL = [Case("1b", "torchao", "rowwise"), Case("1b", "torchao", "tensorwise")]
EMULATED = (Case("tiny", "torchao", "rowwise", emulated=True),)
NULL = Case("1b", "bf16", "none", questions=("speedup",))
"""
CASE = Case("1b", "torchao", "rowwise")
TIMED = ("speedup", "bf16_ms", "fp8_ms")
QUIET = [[0.1, 0.101, 0.099, 0.1, 0.1, 0.1], [0.102, 0.101, 0.102, 0.103, 0.102, 0.102]]


def baseline(case=CASE, speed=QUIET, memory=0.85, **origin):
    metrics = {
        "speedup": speed,
        "bf16_ms": [120.0, 120.4],
        "fp8_share": [0.78],
        "fp8_layers": [28],
        "memory_ratio": [memory],
        "loss_gap": [0.005, -0.001, 0.01],
    }
    return stored(case.id, case.digest(), metrics=metrics, **origin)


def later(day=21, **change):
    """The project's baseline with a session behind its first."""
    first = baseline()
    return replace(
        first, sessions=(*first.sessions, *baseline(date=f"2026-11-{day}", run=f"{day:012}", **change).sessions)
    )


def faster(by):
    return [[x + by for x in blocks] for blocks in QUIET]


def project_in(folder):
    """The folder as such a project."""
    (folder / "suites").mkdir()
    (folder / "suites/matrix.py").write_text(SUITE)
    write_baseline(folder / "baselines", baseline())
    return folder


def commands_in(capsys):
    """Calls `pytest-fp8 baselines` with its arguments: the exit code, what it printed, and its errors."""

    def call(*arguments):
        code = main(["baselines", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call
