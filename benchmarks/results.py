"""The stored baselines as tables of results, which are the page ``docs/results.md``.

    python -m benchmarks.results [FOLDER] > docs/results.md

FOLDER holds the baselines (default: ``baselines``).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pytest_fp8.baselines.record import Baseline, StoredSession
from pytest_fp8.baselines.review import level
from pytest_fp8.baselines.store import read_folder, readable
from pytest_fp8.report.baselines import interval_of, level_of, libraries_of
from pytest_fp8.report.table import markdown_table
from pytest_fp8.zoo.shapes import SHAPES

COLUMNS = ("case", "FP8 layers", "FP8 FLOPs", "loss gap", "BF16 step", "FP8 step", "speedup (99 %)", "memory", "from")
FROM = {"fp8_share": "FP8", "loss_gap": "loss", "speedup": "speed", "memory_ratio": "memory"}
"""One metric of each question, and how the last column calls what an earlier session measured."""
HEAD = """\
# Results on each GPU

Made by `python -m benchmarks.results {folder}` from the stored baselines, not written by hand.

Each row is one case: FP8 training against its reference, the same training in BF16.

| column | meaning |
|---|---|
| FP8 layers | number of `nn.Linear` layers that run in FP8 |
| FP8 FLOPs | their share of the FLOPs of all matrix products in one training step |
| loss gap | FP8 loss minus BF16 loss at the end, mean over seeds, in nats (own models: in their loss's unit) |
| BF16 step, FP8 step | median time of one training step |
| speedup (99 %) | BF16 time over FP8 time, with its 99 % interval over the processes that were measured |
| memory | peak of allocated memory, FP8 over BF16 |
| from | the newest measurement, listed below the tables of each GPU; "loss 4": the loss is of an earlier one, the 4th |

A dash means that the case does not ask this question, or was not asked it yet. Figures that only an earlier measurement
has may be of a question that the suite no longer asks, such as the loss of 8B. `pytest-fp8 baselines list CASE` prints
every stored value.
[Measurements](measurements.md) says how to read the figures."""

BUSY = (
    "A dash: not asked, or not measured on this GPU. *(busy)*: the speedup of the time in which the GPU works; the FP8",
    "arm's step waits for its host, and its step time, in the tables below, says as much about the host.",
)

TIMES = ("BF16 step", "FP8 step", "busy", "idle", "wire, not hidden", "earned", "casts etc.", "all else")
ACCOUNT = ("case", *TIMES, "speedup", "limit", "reached")
MEANING = (
    "Milliseconds of one step, of BF16 and of FP8 where a cell has two. *busy*: the GPU works. *wire, not hidden*: it",
    "waits for other GPUs with nothing else to do. *earned*: what products saved by running in FP8; *casts etc.*: what",
    "other kernels took longer; *limit*: the speedup if nothing but these products changed.",
    "[Verdicts](verdicts.md#the-account) has the formulas. Sessions keep their account since 2026-11-23.",
)
SAME_WORK = re.compile(r"(?P<work>.+?)(?:-(?:ddp|fsdp2|zero3|own)\.(?P<gpus>\d+))?-(?P<batch>\d+)x(?P<seq>\d+)")
"""A case with its batch and sequence in its name, whose batch is that of all its GPUs."""


def markdown(stored: Sequence[Baseline], folder: Path) -> list[str]:
    """The page: for each GPU a table for each model, then the measurements that the tables refer to."""
    lines = HEAD.format(folder=folder.as_posix()).splitlines()
    stored = in_order(stored)
    gpus = sorted({baseline.gpu for baseline in stored})
    if len(gpus) > 1:
        lines += side_by_side(stored, gpus)
    if more := by_number_of_gpus(stored):
        lines += ["", "## By the number of GPUs", "", *MEANING, *more]
    for gpu in gpus:
        mine = [baseline for baseline in stored if baseline.gpu == gpu]
        lines += ["", f"## {gpu}", "", *dict.fromkeys(map(_device, mine))]
        origins: dict[str, int] = {}
        for model, same in groupby(mine, model_of):
            rows = [cells(baseline, origins) for baseline in same]
            lines += ["", f"### {gpu}: {model}", "", *markdown_table(COLUMNS, rows)]
        if accounts := account_table(mine):
            lines += ["", f"### {gpu}: where a step goes", "", *MEANING, "", *accounts]
        lines += ["", f"### {gpu}: measurements", ""]
        lines += [f"{number}. {text}" for text, number in origins.items()]
    return lines


def side_by_side(stored: Sequence[Baseline], gpus: Sequence[str]) -> list[str]:
    """One row for each case: the speedup and the memory of each GPU beside each other."""
    found = {(baseline.gpu, baseline.case): baseline for baseline in stored}

    def cell(gpu: str, case: str, what: str) -> str:
        each = found.get((gpu, case))
        if each is None:
            return "-"
        metric = what if what == "memory_ratio" else each.gated or what
        return level_of(metric, each.values(metric)) + (" (busy)" if metric == "busy_speedup" else "")

    rows = []
    for case in dict.fromkeys(baseline.case for baseline in stored):
        facts = [cell(gpu, case, what) for what in ("speedup", "memory_ratio") for gpu in gpus]
        if set(facts) != {"-"}:
            rows.append([f"`{case}`", *facts])
    columns = ["case", *(f"{what}, {gpu}" for what in ("speedup", "memory") for gpu in gpus)]
    return ["", "## Side by side", "", *BUSY, "", *markdown_table(columns, rows)]


def in_order(stored: Iterable[Baseline]) -> list[Baseline]:
    """The models of the suite by size, and then those of users."""
    sizes = [*SHAPES, "own"]
    return sorted(stored, key=lambda baseline: (sizes.index(model_of(baseline)), baseline.case))


def model_of(baseline: Baseline) -> str:
    """``1b`` of ``1b-te-delayed``; ``own`` of all models that users bring."""
    return baseline.case.partition("-")[0].partition(".")[0]


def cells(baseline: Baseline, origins: dict[str, int]) -> list[str]:
    """One row. ``origins`` numbers the measurements in the order in which rows refer to them."""

    def number(session: StoredSession) -> int:
        dirty = " with changed files" if session.dirty else ""
        return origins.setdefault(f"{session.origin}{dirty}: {libraries_of(session)}", len(origins) + 1)

    # The newest session; of what it did not measure, the column with the number of an earlier one.
    measured, earlier = [str(number(baseline.newest))], defaultdict(list)
    for metric, column in FROM.items():
        sessions = baseline.measured_in(metric)
        if sessions and sessions[-1] is not baseline.newest:
            earlier[number(sessions[-1])].append(column)
    before = ("fp8_layers", "fp8_share", "loss_gap", "bf16_ms", "fp8_ms")
    return [
        f"`{baseline.case}`",
        *(level_of(metric, baseline.values(metric)) for metric in before),
        interval_of(baseline.values("speedup")),
        level_of("memory_ratio", baseline.values("memory_ratio")),
        "; ".join(measured + [f"{', '.join(columns)} {which}" for which, columns in earlier.items()]),
    ]


def _device(baseline: Baseline) -> str:
    """The GPU as the driver called it; emulated cases have a name alone."""
    facts = baseline.newest.gpu
    driver = f", driver {facts['driver']}" if "driver" in facts else ""
    power = f", {facts['power_limit']:.0f} W" if "power_limit" in facts else ""
    return f"{facts['name']}{driver}{power}."


def account_table(stored: Iterable[Baseline]) -> list[str]:
    """A row for each baseline that has an account; empty without one."""
    rows = [cells for baseline in stored if (cells := account_cells(baseline))]
    return markdown_table(ACCOUNT, rows) if rows else []


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
    for (gpu, work, each), found in sorted(works.items(), key=lambda item: item[0][0]):
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
    idle = (max(0.0, 1 - works / step) for step, works in zip(steps, busy, strict=True))
    wire = [found[name] for name in ("bf16_wire_ms", "fp8_wire_ms") if name in found]
    earned, casts, limit = found["earned_ms"], found["casts_ms"], found["speedup_limit"]
    speedup = found["busy_speedup" if session.host_bound else "speedup"]
    return [
        f"`{baseline.case}`",
        *(f"{step:.1f}" for step in steps),
        " / ".join(f"{works:.1f}" for works in busy),
        " / ".join(f"{share:.1%}" for share in idle),
        " / ".join(f"{one:.1f}" for one in wire) or "-",
        f"{earned:.1f}",
        f"{casts:+.1f}",
        f"{steps[1] - steps[0] + earned - casts:+.1f}",
        f"{speedup:.3f}x" + (" (busy)" if session.host_bound else ""),
        f"{limit:.2f}x",
        f"{(speedup - 1) / (limit - 1):.0%}" if limit > 1.01 else "-",
    ]


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "baselines")
    print("\n".join(markdown([stored for _, stored in sorted(readable(read_folder(where)).items())], where)))
