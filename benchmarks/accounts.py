"""Where each case's step goes: the accounts in a run's report, as a table.

    pytest suites -m core -k "test_faster or test_speedup" --fp8-gpu=h200 --fp8-report-dir=out
    python -m benchmarks.accounts out/report.json [--markdown]

Instant: it reads a report, and measures nothing. The exit code is 1 where the report has no account. Milliseconds of
one step; "distance" is the share of the way to the limit that the speedup has come.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import report_at
from pytest_fp8.verdicts import Verdict

COLUMNS = (
    "case",
    "BF16 step",
    "FP8 step",
    "busy",
    "idle",
    "earned",
    "casts etc.",
    "all else",
    "speedup",
    "limit",
    "distance",
    "verdict",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accounts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--markdown", action="store_true", help="as a table for a page of docs")
    options = parser.parse_args(arguments)
    with report_at(options.report) as report:
        rows = [row for case, entry in report["entries"].items() if (row := cells(case, entry))]
    if not rows:
        print("no account in this report: no case was asked for its speed on a GPU", file=sys.stderr)
        return 1
    if options.markdown:
        for row in (COLUMNS, ["---"] * len(COLUMNS), *rows):
            print(f"| {' | '.join(row)} |")
        return 0
    from pytest_fp8.report.tables import table

    table(COLUMNS, rows)
    return 0


def cells(case: str, entry: Mapping[str, Any]) -> list[str]:
    """One row; empty for a case without an account."""
    decision = entry["decisions"].get("speedup") or entry["decisions"].get("faster")
    account = decision["numbers"].get("account") if decision is not None else None
    if account is None:
        return []
    bf16, fp8, on_busy = account["bf16"], account["fp8"], decision["numbers"]["gated_on"] == "busy time"
    reached = account["reached"]
    return [
        case,
        f"{bf16['step']:.1f}",
        f"{fp8['step']:.1f}",
        f"{bf16['busy']:.1f} / {fp8['busy']:.1f}",
        f"{bf16['idle'] / bf16['step']:.1%} / {fp8['idle'] / fp8['step']:.1%}",
        f"{account['earned_ms']:.1f}",
        f"{account['casts_ms']:+.1f}",
        f"{account['all_else_ms']:+.1f}",
        f"{decision['numbers']['gated_speedup']:.3f}x" + (" (busy)" if on_busy else ""),
        f"{account['busy_limit' if on_busy else 'limit']:.2f}x",
        "-" if reached is None else f"{reached:.0%}",
        Verdict[decision["verdict"]].name,
    ]


if __name__ == "__main__":
    sys.exit(main())
