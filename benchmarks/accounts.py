"""Where each case's step goes: the accounts in a run's report, as a table.

    pytest suites -m core -k "test_faster or test_speedup" --fp8-gpu=h200 --fp8-report=out
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
from pytest_fp8.report.results import GAINS, STEPS, gain_cells, step_cells
from pytest_fp8.report.tables import markdown_table, table
from pytest_fp8.verdicts import Verdict

COLUMNS = ("case", *STEPS, *GAINS, "distance", "verdict")


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
        print("\n".join(markdown_table(COLUMNS, rows)))
    else:
        table(COLUMNS, rows)
    return 0


def cells(case: str, entry: Mapping[str, Any]) -> list[str]:
    """One row; empty for a case without an account."""
    decision = entry["decisions"].get("speedup") or entry["decisions"].get("faster")
    account = decision["numbers"].get("account") if decision is not None else None
    if account is None:
        return []
    on_busy, reached = decision["numbers"]["on_busy"], account["reached"]
    steps, busy = ([account[arm][what] for arm in ("bf16", "fp8")] for what in ("step", "busy"))
    speedup, limit = decision["numbers"]["gated_speedup"], account["busy_limit" if on_busy else "limit"]
    return [
        case,
        *step_cells(steps, busy),
        *gain_cells(steps, account["earned_ms"], account["casts_ms"], speedup, on_busy, limit),
        "-" if reached is None else f"{reached:.0%}",
        Verdict[decision["verdict"]].name,
    ]


if __name__ == "__main__":
    sys.exit(main())
