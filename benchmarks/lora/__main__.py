"""What the rank of LoRA adapters costs of FP8's speedup, from stored baselines.

    python -m benchmarks.lora [--model 1b] [--backend torchao] [--recipe tensorwise] [--json]

Instant: it reads baselines, and measures nothing. Step times of two hosts differ by up to 5 %, which is more than a
rank costs. Measure all ranks in one session: benchmarks/claims/cases.py has them, test_measure.py beside it asks them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.claims.stored import BASELINES, HERE, MEASURED, measure, stored_on, update
from benchmarks.lora.model import RANKS, Fit, Point, fit, weight_of
from pytest_fp8.baselines.record import Baseline
from pytest_fp8.case import Case
from pytest_fp8.errors import BaselineError, Fp8Error
from pytest_fp8.report.tables import new_table
from pytest_fp8.zoo.shapes import SHAPES

REASON = "ranks of adapters"
TRIED_RANKS = (0, 8, 16, 32, 64)
TARGETS: tuple[tuple[str, ...], ...] = ((), ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"))
"""All of a block's Linears, and the two choices that people make to have fewer adapters."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="1b")
    parser.add_argument("--backend", default="torchao")
    parser.add_argument("--recipe", default="tensorwise")
    parser.add_argument("--dir", type=Path, nargs="+", metavar="FOLDER", default=[MEASURED, BASELINES])
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        full = Case(options.model, options.backend, options.recipe)
        stored = stored_on(options.gpu, options.dir)
        measured = cases(full, stored)
        points = [(case, point(case, stored[case.id])) for case in measured]
        fitted = fit_or_say(full, [one for _, one in points], options.gpu)
    except Fp8Error as error:
        print(error.message, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"fit": vars(fitted), "cases": [row(c, p, fitted) for c, p in points]}, indent=1))
    else:
        show(points, fitted, full)
        for line in caveats([stored[case.id] for case in measured if case.lora]):
            print(line)
    return 0


def cases(full: Case, stored: Mapping[str, Baseline]) -> list[Case]:
    """The ranks and targets that have a baseline of today's definition, rank 0 first."""
    tried = [
        full if not rank else replace(full, lora=rank, lora_targets=targets)
        for targets in TARGETS
        for rank in TRIED_RANKS
        if rank or not targets
    ]
    return [case for case in tried if case.id in stored and stored[case.id].case_hash == case.digest()]


def point(case: Case, baseline: Baseline) -> Point:
    for arm in ("bf16_ms", "fp8_ms"):
        if not baseline.values(arm):
            raise BaselineError(
                None,
                f"the baseline of {case.id} has no step times",
                expected="bf16_ms and fp8_ms, from the speedup question",
                seen=f"no {arm}",
                next_step=measure([case.id], baseline.gpu, REASON),
            )
    weight = weight_of(SHAPES[case.model], case.lora_targets)
    return Point(case.lora, tuple(baseline.values("bf16_ms")), tuple(baseline.values("fp8_ms")), weight)


def fit_or_say(full: Case, points: Sequence[Point], gpu: str) -> Fit:
    """The fit; raises :class:`BaselineError` with the command that measures more ranks."""
    try:
        return fit(points)
    except ValueError as error:
        ranks = sorted({p.rank for p in points if p.rank})
        raise BaselineError(
            None,
            f"too few ranks of {full.id} on {gpu} to fit a line to",
            expected=f"baselines of {RANKS} ranks of adapters, e.g. 8, 16, 32 and 64",
            seen=", ".join(f"rank {rank}" for rank in ranks) or "none with adapters",
            cause=str(error),
            next_step=update(HERE, f"{full.id}-lora", gpu, REASON),
        ) from error


def row(case: Case, point: Point, fitted: Fit) -> dict[str, Any]:
    """One case as numbers: milliseconds, ratios and fractions. Rank 0 is no point of the fit."""
    adapted = {
        "adapter_ms": fitted.adapter_ms(point.rank, point.weight),
        "adapter_share": fitted.share(point.rank, point.weight),
        "predicted": fitted.speedup(point.rank, point.weight),
    }
    return {
        "case": case.id,
        "rank": point.rank,
        "weight": point.weight,
        "bf16_ms": sum(point.bf16_ms) / len(point.bf16_ms),
        "fp8_ms": sum(point.fp8_ms) / len(point.fp8_ms),
        "speedup": point.speedup,
        **(adapted if point.rank else {}),
    }


def show(points: Sequence[tuple[Case, Point]], fitted: Fit, full: Case) -> None:
    table = new_table(f"{full.id}: adapters' ranks")
    columns = (
        "rank",
        "adapters on",
        "BF16 ms",
        "FP8 ms",
        "speedup",
        "adapters' ms",
        "of FP8 step",
        "predicted",
        "residual",
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 1 else "right")
    bound = "" if fitted.adapters is not None else ">= "
    for case, measured in points:
        facts = row(case, measured, fitted)
        predicted = ["-"] * 4
        if measured.rank:
            predicted = [
                f"{bound}{facts['adapter_ms']:.2f}",
                f"{bound}{facts['adapter_share']:.1%}",
                f"{facts['predicted']:.3f}x",
                f"{facts['speedup'] / facts['predicted'] - 1:+.2%}",
            ]
        where = ", ".join(case.lora_targets) or ("all Linears" if case.lora else "none: all weights are trained")
        times = [f"{facts['bf16_ms']:.2f}", f"{facts['fp8_ms']:.2f}", f"{facts['speedup']:.3f}x"]
        table.add_row(str(measured.rank), where, *times, *predicted)
    Console(width=None if sys.stdout.isatty() else 132).print(table)
    print("\n".join(described(fitted)))


def described(fitted: Fit) -> list[str]:
    """The fitted model in words."""
    errors = fitted.errors
    fixed, without = "", "with adapters of no rank, their fixed part included"
    if fitted.adapters is not None:
        fixed = f", and {fitted.adapters:.2f} +- {errors['adapters']:.2f} ms at any"
        without = "without adapters"
    lines = [
        f"base: BF16 {fitted.bf16_base:.2f} +- {errors['bf16_base']:.2f} ms, FP8 {fitted.fp8_base:.2f} +- "
        f"{errors['fp8_base']:.2f} ms: {fitted.bf16_base / fitted.fp8_base:.3f}x {without}",
        f"adapters: {fitted.slope * 1000:.1f} +- {errors['slope'] * 1000:.1f} us a rank on all Linears{fixed}",
        f"the arms' own slopes: BF16 {fitted.slopes[0] * 1000:.1f}, FP8 {fitted.slopes[1] * 1000:.1f} us a rank",
    ]
    if fitted.adapters is None:
        lines.append("adapters on fewer Linears, at one of these ranks, would tell their fixed part from the base")
    return lines


def caveats(baselines: Sequence[Baseline]) -> list[str]:
    """A warning where the baselines come from different sessions, which may hide what a rank costs."""
    sessions = {(s.date, s.commit, s.run, str(s.gpu)) for b in baselines for s in b.measured_in("fp8_ms")[-1:]}
    if len(sessions) < 2:
        return []
    return [
        f"note: from {len(sessions)} sessions, whose hosts may differ by up to 5 %, which is more than a rank costs"
    ]


if __name__ == "__main__":
    sys.exit(main())
