"""The pictures of one case: what each shows, its raw numbers, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_fp8.report.numbers import columns, number, numbers, speed_in
from pytest_fp8.report.page.drawing import (
    BAD,
    BAND,
    BF16,
    FAINT,
    FP8,
    GOOD,
    INK,
    Picture,
    drawing,
    legend_above,
    whole_ticks,
)
from pytest_fp8.report.page.layers import layers

PHASES = ("forward", "backward", "optimizer")


def pictures_of(entry: Mapping[str, Any], key: str) -> list[Picture]:
    """Those for which the case has numbers. ``key``: a prefix for ids, other for each case of a page."""
    found = []
    for index, draw in enumerate(PICTURES):
        try:
            picture = draw(entry, f"{key}{index}")
        except (ArithmeticError, ValueError):
            # Numbers that no axis can show, such as 1e308 beside 1.
            continue
        found += [picture] if picture is not None else []
    return found


def curves(entry: Mapping[str, Any], key: str) -> Picture | None:
    runs = [run for run in entry["evidence"].get("curves", ()) if run["bf16"] and len(run["bf16"]) == len(run["fp8"])]
    if not runs:
        return None
    margin = number(entry["decisions"], "loss", "numbers", "margin")
    steps = range(1, max(len(run["bf16"]) for run in runs) + 1)
    rows = [
        [run["seed"], step + 1, *pair]
        for run in runs
        for step, pair in enumerate(zip(run["bf16"], run["fp8"], strict=True))
    ]
    title = "Loss of both arms, and the gap between them"
    with drawing(key, title, 4.2, panels=2) as drawn:
        losses, gaps = drawn.axes
        for run in runs:
            here = steps[: len(run["bf16"])]
            first = run is runs[0]
            losses.plot(here, _floats(run["bf16"]), color=BF16, lw=2.4, alpha=0.55, label="BF16" if first else None)
            losses.plot(here, _floats(run["fp8"]), color=FP8, lw=1, ls="--", label="FP8" if first else None)
            gap = [b - a for a, b in zip(_floats(run["bf16"]), _floats(run["fp8"]), strict=True)]
            gaps.plot(here, gap, color=FP8, lw=0.8, alpha=0.7, label="each seed" if first else None)
        if margin is not None:
            gaps.axhspan(-margin, margin, color=BAND, alpha=0.18, lw=0, label=f"margin of the end, +-{margin:.3g}")
        gaps.axhline(0, color=INK, lw=0.8)
        losses.set_ylabel("loss")
        gaps.set_ylabel("FP8 - BF16")
        gaps.set_xlabel("training step")
        whole_ticks(losses, gaps)
        legend_above(losses, gaps)
    reads = f"{len(runs)} seed(s). Where FP8 trains as BF16 does, the lines lie on each other and the gap stays small."
    return Picture(title, reads, drawn.svg, columns(("seed", "step", "bf16", "fp8"), rows))


def blocks(entry: Mapping[str, Any], key: str) -> Picture | None:
    from pytest_fp8.rules.speed import ratios_by_process

    processes = [p for p in entry["timing"].get("processes", ()) if len(p["bf16"]) == len(p["fp8"]) > 0]
    if not processes or not all(value > 0 for p in processes for arm in ("bf16", "fp8") for value in p[arm]):
        return None
    ratios = ratios_by_process([p["bf16"] for p in processes], [p["fp8"] for p in processes])
    said = speed_in(entry["decisions"])
    low, high, baseline = (number(said, "numbers", name) for name in ("low", "high", "baseline"))
    on_busy = said.get("numbers", {}).get("on_busy")
    baseline = None if on_busy else baseline
    title = "Speedup of each block of steps"
    rows = [[p + 1, b + 1, math.exp(value)] for p, process in enumerate(ratios) for b, value in enumerate(process)]
    with drawing(key, title, 2.6) as drawn:
        (axes,) = drawn.axes
        start = 0
        for index, process in enumerate(ratios):
            here = range(start + 1, start + len(process) + 1)
            axes.plot(
                here, [math.exp(value) for value in process], "o", ms=4, color=FP8, label="" if index else "block"
            )
            if index:
                axes.axvline(start + 0.5, color=FAINT, lw=0.8, ls=":")
            start += len(process)
        axes.axhline(1.0, color=INK, lw=0.9, label="as fast as BF16")
        if baseline is not None:
            axes.axhline(baseline, color=GOOD, lw=1.2, ls="--", label=f"baseline {baseline:.3f}x")
        if low is not None and high is not None:
            axes.axhspan(low, high, color=BAND, alpha=0.18, lw=0, label=f"99 % interval {low:.3f} to {high:.3f}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}x")
        axes.set_xlabel("block; dotted lines part fresh pairs of processes")
        axes.set_ylabel("BF16 time / FP8 time")
        whole_ticks(axes)
        legend_above(axes)
    reads = "Blocks that scatter more than the interval, or drift, say that something else ran or that clocks moved."
    if on_busy:
        reads += " These are step times; the baseline is one of busy time, since an arm waits for its host."
    return Picture(title, reads, drawn.svg, columns(("process", "block", "speedup"), rows))


def waterfall(entry: Mapping[str, Any], key: str) -> Picture | None:
    said = speed_in(entry["decisions"])
    account = said.get("numbers", {}).get("account") or {}
    bf16, fp8 = number(account, "bf16", "step"), number(account, "fp8", "step")
    moved = [number(account, name) for name in ("earned_ms", "casts_ms", "all_else_ms")]
    limit = number(account, "limit")
    if bf16 is None or fp8 is None or None in moved:
        return None
    earned, casts, rest = (value or 0.0 for value in moved)
    bars = (
        ("BF16 step", 0.0, bf16, BF16),
        ("products\nin FP8", bf16, -earned, _colour(-earned)),
        ("casts and\nother kernels", bf16 - earned, casts, _colour(casts)),
        ("all else,\nidle too", bf16 - earned + casts, rest, _colour(rest)),
        ("FP8 step", 0.0, fp8, FP8),
    )
    title = "From the BF16 step to the FP8 step"
    with drawing(key, title, 3.0) as drawn:
        (axes,) = drawn.axes
        for index, (_, base, size, colour) in enumerate(bars):
            axes.bar(index, size, bottom=base, color=colour, width=0.62)
            sign = "" if index in (0, 4) else "+" if size > 0 else "-"
            axes.text(index, max(base, base + size), f"{sign}{abs(size):.1f}", ha="center", va="bottom", fontsize=8)
        if limit:
            axes.axhline(
                bf16 / limit, color=INK, lw=1, ls="--", label=f"limit {limit:.2f}x: casts and all else cost nothing"
            )
            legend_above(axes)
        axes.set_xticks(range(len(bars)), [name for name, *_ in bars])
        axes.set_ylabel("ms a step")
        axes.set_ylim(0, 1.1 * max(max(base, base + size) for _, base, size, _ in bars))
        axes.grid(visible=False, axis="x")
    reads = "What products gained by running in FP8, what the casts for it cost, and where the rest of the step went."
    roles = [
        [arm, name, value]
        for arm in ("bf16", "fp8")
        for part in ("classes", "roles")
        for name, value in numbers(account, arm, part).items()
    ]
    grown = [["longer than in BF16", name, value] for name, value in _grown(account)]
    if grown:
        reads += f" Of the other kernels {grown[0][1]} takes the most more than in BF16, {grown[0][2]:.1f} ms."
    rows = [[name.replace("\n", " "), "", size] for name, _, size, _ in bars] + roles + grown
    return Picture(title, reads, drawn.svg, columns(("what", "part", "ms"), rows))


def _grown(account: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Kernels that take longer in the FP8 arm, and by how many milliseconds. A report may be any JSON."""
    found = account.get("grown")
    kernels = [(each, number(each, "milliseconds")) for each in found] if isinstance(found, list) else []
    return [(str(each.get("name")), longer) for each, longer in kernels if longer is not None]


def memory(entry: Mapping[str, Any], key: str) -> Picture | None:
    said = entry["decisions"].get("memory", {})
    fp8, bf16 = numbers(said, "numbers", "phases"), numbers(said, "numbers", "bf16_phases")
    phases = [phase for phase in dict.fromkeys([*PHASES, *fp8]) if phase in fp8 and phase in bf16]
    if not phases:
        return None
    title = "Peak of allocated memory by phase"
    with drawing(key, title, 2.2) as drawn:
        (axes,) = drawn.axes
        for arm, values, shift, colour in (("BF16", bf16, 0.19, BF16), ("FP8", fp8, -0.19, FP8)):
            y = [index + shift for index in range(len(phases))]
            axes.barh(y, [values[phase] for phase in phases], height=0.34, color=colour, label=arm)
            for at, phase in zip(y, phases, strict=True):
                axes.text(values[phase], at, f" {values[phase]:.3g}", va="center", fontsize=8)
        axes.set_yticks(range(len(phases)), phases)
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        axes.margins(x=0.1)
        legend_above(axes)
        axes.grid(visible=False, axis="y")
    rows = [[phase, bf16[phase], fp8[phase]] for phase in phases]
    reads = "The largest phase decides whether a larger batch fits."
    return Picture(title, reads, drawn.svg, columns(("phase", "BF16 GiB", "FP8 GiB"), rows))


def history(entry: Mapping[str, Any], key: str) -> Picture | None:
    said = entry["decisions"].get("speedup", {})
    gated = "busy_speedup" if said.get("numbers", {}).get("on_busy") else "speedup"
    past = [(each["date"], each["commit"], _of_session(each, gated)) for each in entry["evidence"].get("history", ())]
    past = [each for each in past if each[2] is not None]
    now = number(said, "numbers", "gated_speedup")
    if not past or now is None:
        return None
    title = f"The baseline's sessions and this one: {gated.replace('_', ' ')}"
    rows = [*past, ("this session", "", now)]
    with drawing(key, title, 2.2) as drawn:
        (axes,) = drawn.axes
        axes.plot(range(len(past)), [value for *_, value in past], "o-", color=GOOD, ms=4, lw=1, label="baseline")
        axes.plot([len(past)], [now], "D", color=FP8, ms=5, label="this session")
        # Eight sessions and this one stand side by side: the table has their years.
        names = [f"{date[-5:]}\n{commit[:7]}" for date, commit, _ in past]
        axes.set_xticks(range(len(rows)), [*names, "this\nsession"], fontsize=7)
        axes.margins(0.12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3f}x")
        legend_above(axes)
    return Picture(
        title, "Each point is one session, on a host of its own.", drawn.svg, columns(("date", "commit", gated), rows)
    )


def _of_session(session: Mapping[str, Any], gated: str) -> float | None:
    """A stored session's speedup; of busy time also where no arm waited."""
    found = number(session, gated)
    return number(session, "quiet_busy_speedup") if found is None and gated == "busy_speedup" else found


def over_reports(
    key: str, case: str, rows: Sequence[tuple[str, float | None, float | None, float | None]]
) -> Picture | None:
    """The speedup of one case in several reports: (label, speedup, low, high) each."""
    there = [(index, *row) for index, row in enumerate(rows) if row[1] is not None]
    if len(there) < 2:
        return None
    title = "Speedup in each report"
    with drawing(key, title, 2.2) as drawn:
        (axes,) = drawn.axes
        for index, _, middle, low, high in there:
            assert middle is not None
            if low is not None and high is not None:
                axes.plot([index, index], [low, high], color=FP8, lw=1.5)
            axes.plot([index], [middle], "o", color=FP8, ms=4)
        axes.axhline(1.0, color=INK, lw=0.8)
        axes.set_xticks(range(len(rows)), [str(index + 1) for index in range(len(rows))])
        axes.set_xlabel("report, as numbered above")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
    mean = fmean(row[2] for row in there if row[2] is not None)
    return Picture(
        title, f"{case}: {mean:.3f}x on average.", drawn.svg, columns(("report", "speedup", "low", "high"), rows)
    )


PICTURES: Sequence[Callable[[Mapping[str, Any], str], Picture | None]] = (
    *(curves, blocks, waterfall, layers, memory, history),
)


def _floats(values: Sequence[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _colour(milliseconds: float) -> str:
    return BAD if milliseconds > 0 else GOOD
