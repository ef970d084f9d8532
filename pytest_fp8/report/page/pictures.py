"""The pictures of one case: what each shows, its raw numbers, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_fp8.report.cells import number, numbers, speed_in
from pytest_fp8.report.page.drawing import BAD, BAND, BF16, FAINT, FP8, GOOD, INK, Picture, drawing

ROLES = {"fprop": ("o", FP8), "dgrad": ("s", BF16), "wgrad": ("^", GOOD), "recompute": ("x", INK)}
"""Role -> its mark and colour."""
LAYER_COLUMNS = (
    "layer",
    *(f"{role}{what}" for role in ROLES for what in ("", " SQNR dB", " own SQNR dB")),
    "gradient off",
    "limit",
    "skipped",
)
PHASES = ("forward", "backward", "optimizer")
NO_NUMERICS: dict[str, Any] = {"sqnr_db": {}, "own_sqnr_db": {}, "gradient_error": None, "gradient_limit": None}
BAND_STYLE = {"color": BAND, "alpha": 0.18, "lw": 0}


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
    with drawing(key, "Loss of both arms, and the gap between them", 4.2, panels=2, whole=True) as drawn:
        losses, gaps = drawn.axes
        for run in runs:
            bf16, fp8 = ([math.nan if loss is None else float(loss) for loss in run[arm]] for arm in ("bf16", "fp8"))
            here, named = range(1, len(bf16) + 1), run is runs[0]
            losses.plot(here, bf16, color=BF16, lw=2.4, alpha=0.55, label="BF16" if named else None)
            losses.plot(here, fp8, color=FP8, lw=1, ls="--", label="FP8" if named else None)
            gap = [b - a for a, b in zip(bf16, fp8, strict=True)]
            gaps.plot(here, gap, color=FP8, lw=0.8, alpha=0.7, label="each seed" if named else None)
        if margin is not None:
            gaps.axhspan(-margin, margin, **BAND_STYLE, label=f"margin of the end, +-{margin:.3g}")
        gaps.axhline(0, color=INK, lw=0.8)
        losses.set_ylabel("loss")
        gaps.set(xlabel="training step", ylabel="FP8 - BF16")
    reads = f"{len(runs)} seed(s). Where FP8 trains as BF16 does, the lines lie on each other and the gap stays small."
    rows = [
        [run["seed"], step, *pair]
        for run in runs
        for step, pair in enumerate(zip(run["bf16"], run["fp8"], strict=True), 1)
    ]
    return drawn.picture(reads, ("seed", "step", "bf16", "fp8"), rows)


def blocks(entry: Mapping[str, Any], key: str) -> Picture | None:
    from pytest_fp8.stats.estimate import ratios_by_process

    processes = [p for p in entry["timing"].get("processes", ()) if len(p["bf16"]) == len(p["fp8"]) > 0]
    if not processes or not all(value > 0 for p in processes for arm in ("bf16", "fp8") for value in p[arm]):
        return None
    ratios = ratios_by_process([p["bf16"] for p in processes], [p["fp8"] for p in processes])
    speedups = [[math.exp(value) for value in process] for process in ratios]
    said = speed_in(entry["decisions"])
    low, high, baseline = (number(said, "numbers", name) for name in ("low", "high", "baseline"))
    on_busy = said.get("numbers", {}).get("on_busy")
    with drawing(key, "Speedup of each block of steps", 2.6, whole=True) as drawn:
        (axes,) = drawn.axes
        start = 0
        for process in speedups:
            if start:
                axes.axvline(start + 0.5, color=FAINT, lw=0.8, ls=":")
            here = range(start + 1, start + len(process) + 1)
            axes.plot(here, process, "o", ms=4, color=FP8, label="" if start else "block")
            start += len(process)
        axes.axhline(1.0, color=INK, lw=0.9, label="as fast as BF16")
        if baseline is not None and not on_busy:
            axes.axhline(baseline, color=GOOD, lw=1.2, ls="--", label=f"baseline {baseline:.3f}x")
        if low is not None and high is not None:
            axes.axhspan(low, high, **BAND_STYLE, label=f"99 % interval {low:.3f} to {high:.3f}")
        axes.set(
            yscale="log", xlabel="block; dotted lines part fresh pairs of processes", ylabel="BF16 time / FP8 time"
        )
        axes.yaxis.set_major_formatter("{x:.3g}x")
        axes.yaxis.set_minor_formatter("{x:.3g}x")
    reads = "Blocks that scatter more than the interval, or drift, say that something else ran or that clocks moved."
    if on_busy:
        reads += " These are step times; the baseline is one of busy time, since an arm waits for its host."
    rows = [[p, b, value] for p, process in enumerate(speedups, 1) for b, value in enumerate(process, 1)]
    return drawn.picture(reads, ("process", "block", "speedup"), rows)


def waterfall(entry: Mapping[str, Any], key: str) -> Picture | None:
    account = speed_in(entry["decisions"]).get("numbers", {}).get("account") or {}
    bf16, fp8, limit = (number(account, *path) for path in (("bf16", "step"), ("fp8", "step"), ("limit",)))
    earned, casts, rest = (number(account, name) for name in ("earned_ms", "casts_ms", "all_else_ms"))
    if bf16 is None or fp8 is None or earned is None or casts is None or rest is None:
        return None
    bars = (
        ("BF16 step", 0.0, bf16),
        ("products\nin FP8", bf16, -earned),
        ("casts and\nother kernels", bf16 - earned, casts),
        ("all else,\nidle too", bf16 - earned + casts, rest),
        ("FP8 step", 0.0, fp8),
    )
    with drawing(key, "From the BF16 step to the FP8 step", 3.0) as drawn:
        (axes,) = drawn.axes
        for index, (_, base, size) in enumerate(bars):
            colour, sign = {0: (BF16, ""), 4: (FP8, "")}.get(index, (BAD, "+") if size > 0 else (GOOD, "-"))
            axes.bar(index, size, bottom=base, color=colour, width=0.62)
            axes.text(index, max(base, base + size), f"{sign}{abs(size):.1f}", ha="center", va="bottom", fontsize=8)
        if limit:
            label = f"limit {limit:.2f}x: casts and all else cost nothing"
            axes.axhline(bf16 / limit, color=INK, lw=1, ls="--", label=label)
        axes.set_xticks(range(len(bars)), [name for name, *_ in bars])
        axes.set(ylabel="ms a step", ylim=(0, 1.1 * max(max(base, base + size) for _, base, size in bars)))
        axes.grid(visible=False, axis="x")
    reads = "What products gained by running in FP8, what the casts for it cost, and where the rest of the step went."
    rows: list[list[Any]] = [[name.replace("\n", " "), "", size] for name, _, size in bars]
    for arm, part in (("bf16", "classes"), ("bf16", "roles"), ("fp8", "classes"), ("fp8", "roles")):
        rows += ([arm, name, value] for name, value in numbers(account, arm, part).items())
    # A report may be any JSON.
    found = account["grown"] if isinstance(account.get("grown"), list) else []
    grown = [(str(each.get("name")), longer) for each in found if (longer := number(each, "milliseconds")) is not None]
    if grown:
        reads += f" Of the other kernels {grown[0][0]} takes the most more than in BF16, {grown[0][1]:.1f} ms."
    return drawn.picture(reads, ("what", "part", "ms"), rows + [["longer than in BF16", *each] for each in grown])


def joined(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is known of each Linear, in the model's order: how its products ran, and what they computed."""
    numerics = {each["layer"]: each for each in entry["evidence"].get("numerics", ())}
    return [NO_NUMERICS | numerics.get(each["layer"], {}) | each for each in entry["evidence"].get("layers", ())]


def layers(entry: Mapping[str, Any], key: str) -> Picture | None:
    found = joined(entry)
    if not any(layer["sqnr_db"] or layer["gradient_error"] is not None for layer in found):
        return None
    title = "Layers by role: SQNR of products, and error of gradients"
    with drawing(key, title, 4.2, panels=2, whole=True) as drawn:
        sqnr, error = drawn.axes
        for role, (mark, colour) in ROLES.items():
            there = [(i, number(layer["sqnr_db"], role), layer["ran"].get(role)) for i, layer in enumerate(found)]
            for in_fp8, alpha, label in ((True, 0.9, role), (False, 0.35, f"{role}, not FP8")):
                points = [(i, value) for i, value, kind in there if value is not None and (kind == "fp8") is in_fp8]
                if points:
                    x, y = zip(*points, strict=True)
                    sqnr.plot(x, y, mark, ms=3, color=colour, alpha=alpha, ls="", label=label)
        errors = {i: 100 * off for i, layer in enumerate(found) if (off := layer["gradient_error"]) is not None}
        limits = {i: 100 * limit for i in errors if (limit := found[i]["gradient_limit"]) is not None}
        error.bar(list(errors), list(errors.values()), color=FP8, width=0.8, label="weight's gradient off BF16's")
        if limits:
            error.plot(list(limits), list(limits.values()), "_", ms=5, color=BAD, ls="", label="its limit")
            error.set_ylim(0, min(1.1 * max(limits.values()), 5 * max(errors.values())) or None)
        sqnr.set(ylabel="SQNR in dB", xlim=(-0.8, len(found) - 0.2))
        error.set(
            ylabel="%", xlabel="layer, in the model's order; the table below names them", xlim=(-0.8, len(found) - 0.2)
        )
    reads = "A layer far below its neighbours computes something else than the recipe's casts explain."
    return drawn.picture(reads, LAYER_COLUMNS, layer_rows(entry))


def layer_rows(entry: Mapping[str, Any]) -> list[list[Any]]:
    """One row of :data:`LAYER_COLUMNS` per layer."""
    parts, ends = ("ran", "sqnr_db", "own_sqnr_db"), ("gradient_error", "gradient_limit", "skipped")
    return [
        [layer["layer"], *(layer[part].get(role) for role in ROLES for part in parts), *(layer[end] for end in ends)]
        for layer in joined(entry)
    ]


def memory(entry: Mapping[str, Any], key: str) -> Picture | None:
    said = entry["decisions"].get("memory", {})
    fp8, bf16 = numbers(said, "numbers", "phases"), numbers(said, "numbers", "bf16_phases")
    phases = [phase for phase in dict.fromkeys([*PHASES, *fp8]) if phase in fp8 and phase in bf16]
    if not phases:
        return None
    with drawing(key, "Peak of allocated memory by phase", 2.2) as drawn:
        (axes,) = drawn.axes
        for arm, values, shift, colour in (("BF16", bf16, 0.19, BF16), ("FP8", fp8, -0.19, FP8)):
            y, widths = [index + shift for index in range(len(phases))], [values[phase] for phase in phases]
            axes.bar_label(axes.barh(y, widths, height=0.34, color=colour, label=arm), fmt=" %.3g", fontsize=8)
        axes.set_yticks(range(len(phases)), phases)
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        axes.margins(x=0.1)
        axes.grid(visible=False, axis="y")
    rows = [[phase, bf16[phase], fp8[phase]] for phase in phases]
    return drawn.picture(
        "The largest phase decides whether a larger batch fits.", ("phase", "BF16 GiB", "FP8 GiB"), rows
    )


def history(entry: Mapping[str, Any], key: str) -> Picture | None:
    said = entry["decisions"].get("speedup", {})
    gated = "busy_speedup" if said.get("numbers", {}).get("on_busy") else "speedup"
    past = []
    for session in entry["evidence"].get("history", ()):
        if (value := number(session, gated)) is not None:
            past.append((session["date"], session["commit"], value))
    now = number(said, "numbers", "gated_speedup")
    if not past or now is None:
        return None
    with drawing(key, f"The baseline's sessions and this one: {gated.replace('_', ' ')}", 2.2) as drawn:
        (axes,) = drawn.axes
        axes.plot(range(len(past)), [value for *_, value in past], "o-", color=GOOD, ms=4, lw=1, label="baseline")
        axes.plot([len(past)], [now], "D", color=FP8, ms=5, label="this session")
        # Eight sessions and this one stand side by side: the table has their years.
        names = [f"{date[-5:]}\n{commit[:7]}" for date, commit, _ in past]
        axes.set_xticks(range(len(past) + 1), [*names, "this\nsession"], fontsize=7)
        axes.margins(0.12)
        axes.yaxis.set_major_formatter("{x:.3f}x")
    rows = [*past, ("this session", "", now)]
    return drawn.picture("Each point is one session, on a host of its own.", ("date", "commit", gated[0]), rows)


def over_reports(
    key: str, case: str, rows: Sequence[tuple[str, float | None, float | None, float | None]]
) -> Picture | None:
    """The speedup of one case in several reports: (label, speedup, low, high) each."""
    there = [(index, middle, low, high) for index, (_, middle, low, high) in enumerate(rows) if middle is not None]
    if len(there) < 2:
        return None
    with drawing(key, "Speedup in each report", 2.2) as drawn:
        (axes,) = drawn.axes
        for index, middle, low, high in there:
            if low is not None and high is not None:
                axes.plot([index, index], [low, high], color=FP8, lw=1.5)
            axes.plot([index], [middle], "o", color=FP8, ms=4)
        axes.axhline(1.0, color=INK, lw=0.8)
        axes.set_xticks(range(len(rows)), [str(index + 1) for index in range(len(rows))])
        axes.set_xlabel("report, as numbered above")
        axes.yaxis.set_major_formatter("{x:.3g}x")
    mean = fmean(middle for _, middle, _, _ in there)
    return drawn.picture(f"{case}: {mean:.3f}x on average.", ("report", "speedup", "low", "high"), rows)


PICTURES: Sequence[Callable[[Mapping[str, Any], str], Picture | None]] = (
    *(curves, blocks, waterfall, layers, memory, history),
)
