"""Where the steps of stored baselines went: the accounts of their newest sessions, as tables of the page of results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_fp8.baselines.metrics import gated_speedup
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.baselines.review import level

COLUMNS = (
    "case",
    "BF16 step",
    "FP8 step",
    "busy",
    "idle",
    "wire, not hidden",
    "earned",
    "casts etc.",
    "all else",
    "speedup",
    "limit",
    "reached",
)
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
    return [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *map(_row, rows)] if rows else []


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
    bf16, fp8, earned, casts = (found[name] for name in ("bf16_ms", "fp8_ms", "earned_ms", "casts_ms"))
    metric = gated_speedup(session.metrics)
    speedup, limit = found[metric], found["speedup_limit"]
    busy = [(found[f"{arm}_busy_ms"], found[f"{arm}_ms"]) for arm in ("bf16", "fp8")]
    wire = [found[name] for name in ("bf16_wire_ms", "fp8_wire_ms") if name in found]
    return [
        f"`{baseline.case}`",
        f"{bf16:.1f}",
        f"{fp8:.1f}",
        " / ".join(f"{works:.1f}" for works, _ in busy),
        " / ".join(f"{max(0.0, 1 - works / step):.1%}" for works, step in busy),
        " / ".join(f"{one:.1f}" for one in wire) or "-",
        f"{earned:.1f}",
        f"{casts:+.1f}",
        f"{fp8 - bf16 + earned - casts:+.1f}",
        f"{speedup:.3f}x" + (" (busy)" if metric == "busy_speedup" else ""),
        f"{limit:.2f}x",
        f"{(speedup - 1) / (limit - 1):.0%}" if limit > 1.01 else "-",
    ]


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
