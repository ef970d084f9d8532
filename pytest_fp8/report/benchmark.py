"""Step times as rows of pytest-benchmark's own table, where that plugin is in use. No other file knows it.

Each case becomes a group of two rows, its BF16 and its FP8 arm, with one entry per block; ``--benchmark-json`` and
``--benchmark-autosave`` store them like any other benchmark. Verdicts do not come from here: pytest-benchmark
compares means of one arm, this plugin paired blocks of both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pytest_fp8.report.ledger import Ledger


def add_rows(config: Any, ledger: Ledger) -> None:
    """Append the rows of every timed case; nothing where pytest-benchmark is absent or disabled (also by xdist)."""
    # pytest-benchmark offers no public name for its session.
    benchmarks = getattr(config, "_benchmarksession", None)
    if benchmarks is None or benchmarks.disabled:
        return
    from pytest_benchmark.stats import Metadata

    for entry in ledger.entries.values():
        for arm in ("bf16", "fp8") if entry.timing else ():
            milliseconds = [time for process in entry.timing["processes"] for time in process[arm]]
            described = SimpleNamespace(
                name=f"{entry.case}[{arm}]",
                fullname=f"pytest-fp8::{entry.case}[{arm}]",
                group=entry.case,
                param=None,
                params=None,
                extra_info={"unit": "s per training step", "case_hash": entry.case_hash},
                cprofile_stats=None,
                has_error=False,
            )
            row = Metadata(described, iterations=1, options={})
            for time in milliseconds:
                row.stats.update(time / 1000)
            benchmarks.benchmarks.append(row)
