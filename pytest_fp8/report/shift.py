"""How far all gated cases of a session moved together: from the record, for the closing summary and the report."""

from __future__ import annotations

import math
from typing import Any

from pytest_fp8.plain import to_plain
from pytest_fp8.report.record import Record
from pytest_fp8.stats.session_shift import Moved, Shift, session_shift, words


def shift_of(record: Record) -> Shift | None:
    """Over the cases whose speed was held against a baseline and not disturbed; ``None`` for too few."""
    return session_shift({case: moved for case, (moved, _) in _gated(record).items()})


def shift_lines(record: Record) -> list[str]:
    """What a person should read of it; empty for a session as sessions are."""
    shift = shift_of(record)
    failed = {case: moved.change for case, (moved, verdict) in _gated(record).items() if verdict == "FAIL"}
    return words(shift, failed) if shift is not None else []


def shift_to_json(record: Record) -> dict[str, Any] | None:
    shift = shift_of(record)
    return None if shift is None else {**to_plain(shift), "moved": shift.moved, "unusual": shift.unusual}


def _gated(record: Record) -> dict[str, tuple[Moved, str]]:
    found = {}
    for name, entry in record.entries.items():
        decision = entry.decisions.get("speedup", {})
        numbers = decision.get("numbers", {})
        # Busy times follow how long the host lets the GPU wait, and not what all cases of a session share.
        steps = not numbers.get("on_busy")
        if numbers.get("change") is not None and decision["verdict"] != "INVALID" and steps:
            moved = Moved(math.log1p(numbers["change"]), numbers["change_error"], numbers["own_error"])
            found[name] = moved, decision["verdict"]
    return found
