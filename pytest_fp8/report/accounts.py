"""Where the steps of stored baselines went: the accounts of their newest sessions, as tables of the page of results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_fp8.baselines.metrics import gated_speedup
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.review import level
from pytest_fp8.report.tables import markdown_table

STEPS = ("BF16 step", "FP8 step", "busy", "idle")
GAINS = ("earned", "casts etc.", "all else", "speedup", "limit")
COLUMNS = ("case", *STEPS, "wire, not hidden", *GAINS, "reached")
MEANING = (
    "Milliseconds of one step, of BF16 and of FP8 where a cell has two. *busy*: the GPU works. *wire, not hidden*: it",
    "waits for other GPUs with nothing else to do. *earned*: what products saved by running in FP8; *casts etc.*: what",
    "other kernels took longer; *limit*: the speedup if nothing but these products changed.",
    "[Verdicts](verdicts.md#the-account) has the formulas. Sessions keep their account since 2026-11-23.",
)
SAME_WORK = re.compile(r"(?P<work>.+?)(?:-(?:ddp|fsdp2|zero3|own)\.(?P<gpus>\d+))?-(?P<batch>\d+)x(?P<seq>\d+)")
"""A case with its batch and sequence in its name, whose batch is that of all its GPUs."""


def account_table(stored: Iterable[Baseline]) -> list[str]:
    """A row for each baseline that has an account; empty without one."""
    rows = [cells for baseline in stored if (cells := account_cells(baseline))]
    return markdown_table(COLUMNS, rows) if rows else []


def by_number_of_gpus(stored: Sequence[Baseline]) -> list[str]:
    """The accounts of one work on each GPU, by how many GPUs share it; empty where no work was done by two numbers."""
    works: dict[tuple[str, ...], dict[int, Baseline]] = {}
    for baseline in stored:
        named = SAME_WORK.fullmatch(baseline.case)
        if named is not None:
            gpus = int(named["gpus"] or 1)
            each = f"{int(named['batch']) / max(1, gpus):g}x{named['seq']}"
            works.setdefault((baseline.gpu, named["work"], each), {})[gpus] = baseline
    lines = []
    for (gpu, work, each), found in works.items():
        table = account_table(found[gpus] for gpus in sorted(found))
        if len(found) > 1 and table:
            lines += ["", f"`{work}` with {each} tokens on each {gpu.upper()}:", "", *table]
    return lines


def account_cells(baseline: Baseline) -> list[str]:
    """One row, of the newest session that has an account; empty without one."""
    session = next((one for one in reversed(baseline.sessions) if "earned_ms" in one.metrics), None)
    if session is None:
        return []
    found = {name: level(name, values) for name, values in session.metrics.items()}
    steps, busy = ([found[f"{arm}{what}"] for arm in ("bf16", "fp8")] for what in ("_ms", "_busy_ms"))
    metric = gated_speedup(session.metrics)
    speedup, limit = found[metric], found["speedup_limit"]
    wire = [found[name] for name in ("bf16_wire_ms", "fp8_wire_ms") if name in found]
    return [
        f"`{baseline.case}`",
        *step_cells(steps, busy),
        " / ".join(f"{one:.1f}" for one in wire) or "-",
        *gain_cells(steps, found["earned_ms"], found["casts_ms"], speedup, metric == "busy_speedup", limit),
        f"{(speedup - 1) / (limit - 1):.0%}" if limit > 1.01 else "-",
    ]


def step_cells(steps: Sequence[float], busy: Sequence[float]) -> list[str]:
    """The cells of :data:`STEPS`. Milliseconds of BF16 and of FP8 each."""
    idle = (max(0.0, 1 - works / step) for step, works in zip(steps, busy, strict=True))
    return [
        *(f"{step:.1f}" for step in steps),
        " / ".join(f"{works:.1f}" for works in busy),
        " / ".join(f"{share:.1%}" for share in idle),
    ]


def gain_cells(
    steps: Sequence[float], earned: float, casts: float, speedup: float, on_busy: bool, limit: float
) -> list[str]:
    """The cells of :data:`GAINS`. ``on_busy``: whether speedup and limit are those of busy time."""
    bf16, fp8 = steps
    return [
        f"{earned:.1f}",
        f"{casts:+.1f}",
        f"{fp8 - bf16 + earned - casts:+.1f}",
        f"{speedup:.3f}x" + (" (busy)" if on_busy else ""),
        f"{limit:.2f}x",
    ]
