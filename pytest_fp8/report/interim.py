"""What is known so far, on disk while tests run: report.json, and candidates of the cases that are done, so that even
SIGKILL and a machine that goes away leave them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_fp8.report.ledger import Ledger

LEAST_SECONDS = 5.0
"""Between two reports."""
MOST_SHARE = 0.02
"""Of the session's time that they may take."""


class Interim:
    """What xdist's workers have told so far, and when the report was written last."""

    def __init__(self) -> None:
        self.told: dict[str, Mapping[str, Any]] = {}
        """Worker -> its ledger as plain data, after its last test."""
        self.closed = False
        """Whether the session's own ledger has it all."""
        self.origin: dict[str, Any] = {}
        """Where the session's measurements come from, once it was looked up."""
        self.news = False
        """Whether a test has ended since the last report."""
        self._next = 0.0
        self._earlier: bool | None = None
        self._done: set[str] = set()
        """Cases that have their candidate."""

    def close(self, ledger: Ledger) -> None:
        """The session ends: add what workers have told that ended without a last word."""
        self.closed = True
        for told in self.told.values():
            ledger.merge(told)

    def found_report(self, folder: Path) -> bool:
        """Whether an earlier session's report lay in the folder before this session's first."""
        if self._earlier is None:
            from pytest_fp8.report.files import holds_report

            self._earlier = holds_report(folder)
        return self._earlier

    def write(self, ledger: Ledger, folder: Path | None, baselines: Path, origin: Callable[[], dict[str, Any]]) -> None:
        """Write what is known, unless it is on disk already or was written a moment ago. The end of the session writes
        it whole, and tells where that fails."""
        start = time.monotonic()
        if folder is None or not self.news or start < self._next:
            return
        known = Ledger()
        known.merge(ledger.to_json())
        for told in self.told.values():
            known.merge(told)
        known.partial = True
        if known.entries:
            self._write(known, folder, baselines, origin)
        now = time.monotonic()
        self._next = max(self._next, now + max(LEAST_SECONDS, (now - start) / MOST_SHARE))
        self.news = False

    def _write(self, known: Ledger, folder: Path, baselines: Path, origin: Callable[[], dict[str, Any]]) -> None:
        from pytest_fp8.errors import Fp8Error
        from pytest_fp8.report.files import remove_report, write_candidates, write_report

        if self.found_report(folder) and not self.origin:
            # Nobody must take an earlier session's page, or candidate, for one of this session's.
            remove_report(folder)
        self.origin = self.origin or origin()
        still_open = known.open_tests or {}
        done = {name for name in known.entries if not still_open.get(name)} - self._done
        try:
            write_candidates(known, folder, baselines, self.origin, done)
            self._done |= done
            write_report(known, folder, self.origin, finished=False)
        except Fp8Error:
            self._next = float("inf")
